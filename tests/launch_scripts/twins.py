"""Tiny twins of launch scripts (`twin_rules`), trained on CPU processes beside one that has no features.

A twin is compared with one process that trains the same model in float32 without any feature. In float32 its
losses and gradients have to be equal; in the precision of the script its losses have to be near.

``python tests/launch_scripts/twins.py [SOURCE …] [--part K/N] [--ranks A-B] [--check]`` trains the twins
whose flags have changed since they were good, says what differs, and keeps the outcomes.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import checked_lines
from checked_lines import Script
from twin_rules import AT_MOST, NEAR, STEPS, TOLERANCE, Twin, twin_of
from verdicts import BAD, OK, Record, summary

from mindspeed_core.validation import check
from mindspeed_testing.canonical import CanonicalState, matches
from mindspeed_testing.compare_sides import compare_sides
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.proof_files import flags_with_files
from mindspeed_testing.training import (
    RankRecord,
    SideRequest,
    SideResult,
    joined_ranks,
    train_rank,
    train_side,
)
from mindspeed_testing.worlds import run_world

RECORD = "trained.json"
"""The outcomes of all twins."""
FILES = ("twin_data:write_conversations",)
"""What makes the files behind ``{files}`` in the flags of a twin."""


@dataclass
class Trained:
    """The outcome of a twin: what differs, one line each; nothing where all is as it should be."""

    largest: float
    features: tuple[str, ...]
    differences: list[str] = field(default_factory=list)


_references: dict[tuple[tuple[str, ...], int], SideResult] = {}


def train(twin: Twin, timeout: float = 300.0) -> Trained:
    """Train a twin beside its reference, and compare.

    Raises:
        mindspeed_testing.worlds.WorldError: one of them does not train.
    """
    key = (twin.plain, twin.plain_world_size)
    if key not in _references:
        _references[key] = train_side(*key, STEPS, files=_files(key[0]), timeout=timeout)
    reference = _references[key]
    commands = [twin.in_float32(), *([twin.flags] if twin.has_16_bits else [])]
    sides = _train_sides(commands, twin.world_size, reference.initial, timeout)
    exact, _ = compare_sides(
        sides[0], reference, tolerance=TOLERANCE, quantities=_COMPARED, demanded=_COMPARED
    )
    found = Trained(exact.largest, sides[0].features)
    wrong = [each for each in exact.failures() if not matches(each.key, _ZERO_GRADIENTS)]
    found.differences += [f"float32: {difference}" for difference in wrong[:8]]
    for side in sides[1:]:
        near, _ = compare_sides(
            side, reference, tolerance=NEAR, quantities=_COMPARED[:1], demanded=_COMPARED[:1]
        )
        found.features = side.features
        found.differences += [f"16 bits: {difference}" for difference in near.failures()[:8]]
    return found


_COMPARED = ("losses", "gradients")
_ZERO_GRADIENTS = ("*.k_layernorm.bias",)
"""Parameters whose gradient is zero up to rounding: all keys moved alike leave the softmax as it is."""


def _train_sides(
    commands: Sequence[Sequence[str]], world_size: int, initial: CanonicalState, timeout: float
) -> list[SideResult]:
    """Train several command lines in one world, one after the other."""
    # As long as `train_side` makes the reference: which rows are packed depends on how many are asked for.
    length = STEPS + 21
    with ExitStack() as stack:
        requests = [
            SideRequest(
                training_flags(stack.enter_context(flags_with_files(flags, _files(flags))), length),
                STEPS,
                initial,
                gradients=not number,
            )
            for number, flags in enumerate(commands)
        ]
        ranks: list[list[RankRecord]] = run_world(train_all, world_size, requests, timeout=timeout)
    return [joined_ranks([rank[number] for rank in ranks]) for number in range(len(requests))]


def _files(flags: Sequence[str]) -> tuple[str, ...]:
    return FILES if "--data-path" in flags else ()


def train_all(requests: Sequence[SideRequest]) -> list[RankRecord]:
    """Train one rank of several sides."""
    return [train_rank(request) for request in requests]


def twins(sources: Sequence[str] = tuple(checked_lines.SOURCES)) -> dict[Twin, list[str]]:
    """Return the twins of all accepted scripts, with the names of its scripts; one of those with one key."""
    found: dict[str, tuple[Twin, list[str]]] = {}
    for script in accepted(sources):
        if "--skip-train" not in script.words:
            twin = twin_of(script)
            found.setdefault(twin.key, (twin, []))[1].append(f"{script.source}:{script.name}")
    return dict(found.values())


def accepted(sources: Sequence[str]) -> Iterator[Script]:
    """Yield the scripts that the record calls accepted."""
    record = checked_lines.kept()
    for source in sources:
        names = {*record[source]["accepted"]}
        yield from (script for script in checked_lines.scripts(source) if script.name in names)


def problems_of(twin: Twin) -> list[str]:
    """Return what is wrong with the flags of a twin and its reference, without training them."""
    found = []
    sides = (
        ("own precision", twin.flags, twin.world_size),
        ("float32", twin.in_float32(), twin.world_size),
        ("reference", twin.plain, twin.plain_world_size),
    )
    for name, flags, size in sides:
        whole = training_flags(flags, STEPS, checked_lines.installed())
        checked = check(whole, world_size=size, platform="cpu", registry=checked_lines.installed())
        found += [f"{name}: {problem}" for problem in checked.problems]
    return found


def main(arguments: Sequence[str]) -> int:
    """Train twins, print a line for each and keep its outcome."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="*", choices=(*checked_lines.SOURCES, []), help="whose scripts")
    parser.add_argument("--part", default="1/1", help="K/N: every N-th twin, from the K-th on")
    parser.add_argument("--ranks", default=f"1-{AT_MOST}", help="twins of so many ranks")
    parser.add_argument("--only", default="", help="twins of a script with these letters in its name")
    parser.add_argument("--check", action="store_true", help="only check their flags")
    parser.add_argument("--again", action="store_true", help="also those that the record calls good")
    args = parser.parse_args(arguments)
    number, count = map(int, args.part.split("/"))
    least, most = map(int, args.ranks.split("-"))
    found = twins(args.sources or tuple(checked_lines.SOURCES))
    chosen = [twin for twin in found if least <= twin.world_size <= most][number - 1 :: count]
    chosen = [twin for twin in chosen if any(args.only in name for name in found[twin])]
    for twin in sorted(chosen, key=lambda twin: twin.world_size):
        if not (args.again or args.check) and Record.read(RECORD).passed(twin.key):
            continue
        started = time.monotonic()
        lines, largest = (problems_of(twin), 0.0) if args.check else _trained(twin)
        _print(twin, found[twin], lines, time.monotonic() - started)
        if not args.check:
            Record.read(RECORD).add(
                twin.key,
                script=found[twin][0],
                ranks=twin.world_size,
                verdict=BAD if lines else OK,
                largest=float(f"{largest:.1e}"),
                **({"lines": lines} if lines else {}),
                scripts=list(found[twin]),
            )
    if args.check:
        return 0
    return summary(RECORD, {twin.key: names for twin, names in found.items()}, whole=not args.sources)


def _print(twin: Twin, names: Sequence[str], lines: Sequence[str], seconds: float) -> None:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    verdict = "BAD" if lines else "ok"
    print(f"{verdict:4}{twin.world_size} ranks {seconds:6.1f} s  {names[0]}{more}", flush=True)
    for line in lines:
        print(f"    {line}")
    if lines:
        print(
            f"    {shlex.join(twin.flags)}\n    beside {twin.plain_world_size}: {shlex.join(twin.plain)}",
            flush=True,
        )


def _trained(twin: Twin) -> tuple[list[str], float]:
    """Return what differs, and the largest relative error in float32."""
    try:
        found = train(twin)
        return found.differences, found.largest
    except Exception as error:
        # The other twins are to be seen too.
        return [f"{type(error).__name__}: {line}" for line in str(error).splitlines()[-6:]], 0.0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
