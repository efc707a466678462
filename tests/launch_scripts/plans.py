"""Plans of launch scripts at their full size and world: dry runs of their ranks, none of them started.

A rank of every kind that an accepted script has (`mindspeed_tune`) runs its first step without devices:
layers of one kind are run once and counted, everything else is as large as the script says. A plan holds
together where every rank has a place, every group is complete and every call of it has its partners; those
of other ranks than these are run with ``--partners``, and by the twins (`twins`), which train. One that needs
more memory than a device of its project's tests has (`DEVICES`) is refused with what it lacks.

``python tests/launch_scripts/plans.py [SOURCE …] [--part K/N] [--platform fake-npu] [--ranks N]`` plans them,
keeps the outcomes, and plans only what has changed when it runs again. What is planned with the kernels of
NPUs needs no other plan.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import checked_lines
import twins
from checked_lines import Script
from verdicts import BAD, LACKS, OK, Record, digest, of_a_step, summary

from mindspeed_tune.driver import KINDS, Ranks, records_of
from mindspeed_tune.hardware import read_hardware
from mindspeed_tune.launch_command import read_command
from mindspeed_tune.launch_plan import LaunchPlan, make_plan
from mindspeed_tune.warm_process import WarmProcess

RECORDS = {"fake": "planned.json", "fake-npu": "planned_npu.json"}
"""The outcomes of all plans, by dry run."""
DEVICES = {
    "mindspeed": "ascend-910b",
    "mindspeed_llm": "ascend-910b",
    "megatron_lm_0.16.1": "h100",
    "megatron_lm_newest": "h100",
}
"""The device of each source's scripts, whose memory a plan has to fit into."""
_LOOKS_AT_VALUES = {"--use-megatron-fsdp", "--use-custom-fsdp"}
"""Megatron-FSDP reads values while it shards a model, which a dry run does not have."""
_NUMBERS = frozenset(
    "--weight-decay --start-weight-decay --end-weight-decay --weight-decay-incr-style --init-method-std "
    "--norm-epsilon --adam-beta1 --adam-beta2 --rotary-base --initial-loss-scale "
    "--moe-router-bias-update-rate".split()
)
"""Options whose values a step computes with, which no size and no call depends on."""
LIMIT = 900.0
"""Seconds after which a rank counts as one that hangs."""


@dataclass(frozen=True)
class Planned:
    """A script to plan.

    Attributes:
        scripts: those that are alike.
        flags: their flags without files.
    """

    scripts: tuple[Script, ...]
    flags: tuple[str, ...]

    @property
    def key(self) -> str:
        """Return the digest of its flags, which say its ranks, and device: its outcome is kept under it."""
        # A made-up file is the same one in every checkout.
        flags = [word.replace(str(checked_lines.LINES.parent), "") for word in self.flags]
        kept = [option for option in of_a_step(flags) if option[0].partition("=")[0] not in _NUMBERS]
        return digest(kept, DEVICES[self.script.source])

    @cached_property
    def world_size(self) -> int:
        """Return its ranks; finding them checks its flags at several worlds."""
        return checked_lines.world_of(self.script)

    @property
    def script(self) -> Script:
        """Return the first of its scripts."""
        return self.scripts[0]

    @property
    def command(self) -> list[str]:
        """Return the command line of the plan."""
        return ["mindspeed-train", "--fake-world-size", str(self.world_size), *self.flags]


def plannable(sources: Sequence[str] = tuple(checked_lines.SOURCES)) -> list[Planned]:
    """Return the accepted scripts that a dry run can train, each set of flags and world once."""
    found: dict[str, Planned] = {}
    for script in twins.accepted(sources):
        if {*script.words} & {"--skip-train", *_LOOKS_AT_VALUES}:
            continue
        one = Planned((script,), tuple(checked_lines.without_files(script.words)))
        alike = found.get(one.key)
        found[one.key] = replace(alike, scripts=(*alike.scripts, script)) if alike else one
    return list(found.values())


def plan(one: Planned, process: WarmProcess, wanted: str = KINDS, *, partners: bool = False) -> LaunchPlan:
    """Plan a script in a running process, with the partners of its ranks or without.

    Raises:
        mindspeed_tune.warm_process.PlanError: a rank of it cannot be planned.
    """
    command = read_command(one.command, {})
    with Ranks(command, process=process, reliefs=False) as runner:
        records = records_of(runner, wanted, partners=partners)
    return make_plan((one.script.name,), records, read_hardware(DEVICES[one.script.source]))


def sources_of(platform: str) -> tuple[str, ...]:
    """Return whose scripts a dry run is for: one with the kernels of NPUs for those written for NPUs."""
    return tuple(
        source for source, device in DEVICES.items() if platform == "fake" or device.startswith("ascend")
    )


def is_wanted(name: str, one: Planned) -> bool:
    """Return whether a record has to hold a script: one that is planned with the kernels of NPUs may do."""
    npus = RECORDS["fake-npu"]
    return name == npus or not Record.read(npus).passed(one.key)


def main(arguments: Sequence[str]) -> int:
    """Plan scripts, print a line for each and keep its outcome."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="*", choices=(*checked_lines.SOURCES, []), help="whose scripts")
    parser.add_argument("--part", default="1/1", help="K/N: every N-th of them, from the K-th on")
    parser.add_argument("--only", default="", help="a script with these letters in its name")
    parser.add_argument("--platform", default="fake", choices=RECORDS, help="the dry run")
    parser.add_argument("--ranks", default=KINDS, help="ranks to plan; by default one of every kind")
    parser.add_argument("--partners", action="store_true", help="compare all calls with another member's")
    parser.add_argument("--parallel", type=int, default=2, help="ranks at once")
    parser.add_argument("--again", action="store_true", help="also those that the record calls good")
    args = parser.parse_args(arguments)
    number, count = map(int, args.part.split("/"))
    name = RECORDS[args.platform]
    found = [one for one in plannable(args.sources or sources_of(args.platform)) if is_wanted(name, one)]
    chosen = [one for one in found if any(args.only in script.name for script in one.scripts)]
    chosen = chosen[number - 1 :: count]
    names = {one.key: [f"{script.source}:{script.name}" for script in one.scripts] for one in found}
    with WarmProcess(args.platform, args.parallel, LIMIT) as process:
        for one in chosen:
            if not args.again and Record.read(name).passed(one.key):
                continue
            started = time.monotonic()
            outcome = _outcome(one, process, args.ranks, args.partners)
            seconds = time.monotonic() - started
            script = f"{one.script.source}:{one.script.name}"
            print(f"{outcome['verdict']:6}{one.world_size:5} ranks {seconds:6.1f} s  {script}", flush=True)
            for line in outcome.get("lines", ()):
                print(f"    {line}", flush=True)
            Record.read(name).add(
                one.key, script=script, ranks=one.world_size, **outcome, scripts=names[one.key]
            )
    return summary(name, names, whole=not args.sources)


def _outcome(one: Planned, process: WarmProcess, wanted: str, partners: bool) -> dict[str, Any]:
    try:
        made = plan(one, process, wanted, partners=partners)
    except Exception as error:
        # The other scripts are to be seen too.
        last = str(error).splitlines()[-6:]
        return {"verdict": BAD, "lines": [f"{type(error).__name__}: {line}" for line in last]}
    return outcome_of(made)


def outcome_of(made: LaunchPlan) -> dict[str, Any]:
    """Return what is kept of a plan: its verdict, what it needs, and what is wrong in ``lines``."""
    fullest = made.fullest.fullest
    wrong_order = made.order.differences or made.order.waiting
    facts: dict[str, Any] = {
        "verdict": BAD if wrong_order else LACKS if made.problems else OK,
        "kinds": len(made.kinds),
        "gibibytes": _gibibytes(fullest.needed),
    }
    if fullest.headroom is not None and fullest.headroom < 0:
        facts["lacking"] = _gibibytes(-fullest.headroom)
    return facts | ({"lines": made.problems} if made.problems else {})


def _gibibytes(size: float) -> float:
    return round(size / 2**30, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
