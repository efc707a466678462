"""Time the checks of a candidate layout: the resolver alone, and with the host's validation.

Searches ask them thousands of times. CPU seconds of one process, the best of several rounds over layouts of
a model on 1,024 ranks, each of which is another question: ``python benchmarks/candidates.py``.
"""

from __future__ import annotations

import argparse
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from itertools import product

from machine import write

from mindspeed_core.discovery.host import DEFAULT_HOST
from mindspeed_core.flags.flag_set import flag_set
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.resolve import resolve
from mindspeed_core.validation import check

BOUND_MS, CHECK_BOUND_MS = 1.0, 4.0
WORLD_SIZE = 1024
_SAMPLED = 16
"""Of so many lines one is checked with a registry of its own too."""
MODEL = (
    "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 "
    "--group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 "
    "--vocab-size 32000 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --attention-dropout 0 --bf16 --mock-data --use-distributed-optimizer "
    "--train-iters 10 --lr 1e-4 --global-batch-size 1024"
)
FEATURES = "--use-flash-attn --use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print milliseconds a candidate; the status is 1 where one takes longer than its bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--print-only", action="store_true", help="do not write benchmarks/results")
    chosen = parser.parse_args(arguments)
    registry = Registry.discover()
    lines = list(candidates())
    parsed = [flag_set(registry).parse(line) for line in lines]

    def resolved(index: int) -> bool:
        args: Namespace = parsed[index].args
        plan = resolve(registry, args, provenance=parsed[index].provenance, platform="cpu", host=DEFAULT_HOST)
        return bool(plan.names)

    def validated(index: int) -> bool:
        return check(lines[index], world_size=WORLD_SIZE, platform="cpu", registry=registry).ok

    found = {
        "candidates": len(lines),
        "features installed": len(registry.features),
        "resolver_ms": milliseconds(resolved, len(lines), chosen.rounds),
        "check_ms": milliseconds(validated, len(lines), chosen.rounds),
        "accepted": sum(map(validated, range(len(lines)))),
        "equal_verdicts": [verdict(line, Registry.discover()) for line in lines[::_SAMPLED]]
        == [verdict(line, registry) for line in lines[::_SAMPLED]],
        "bound_ms_of_the_resolver": BOUND_MS,
        "bound_ms_of_the_check": CHECK_BOUND_MS,
    }
    for name, value in found.items():
        print(f"{name}: {value}")
    if not chosen.print_only:
        write("candidates", found)
    slow = found["resolver_ms"] > BOUND_MS or found["check_ms"] > CHECK_BOUND_MS
    return int(slow or not found["equal_verdicts"])


def verdict(line: Sequence[str], registry: Registry) -> tuple[object, ...]:
    """Return what a check says: with a new registry nothing is remembered of an earlier one."""
    found = check(line, world_size=WORLD_SIZE, platform="cpu", registry=registry)
    return found.problems, found.args and vars(found.args), found.plan and found.plan.digest


def candidates() -> list[list[str]]:
    """Return command lines of layouts, some of which the host refuses."""
    found = []
    for tp, pp, cp, mbs in product((1, 2, 4, 8), (1, 2, 3, 4, 8), (1, 2), (1, 2)):
        layout = (
            f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} "
            f"--context-parallel-size {cp} --micro-batch-size {mbs}"
        )
        sequence = " --sequence-parallel" if tp > 1 else ""
        found.append(f"{MODEL} {FEATURES} {layout}{sequence}".split())
    return found


def milliseconds(ask: Callable[[int], object], count: int, rounds: int) -> float:
    """Return the CPU milliseconds of a candidate in the best round."""
    best = float("inf")
    for _ in range(rounds + 1):
        # The first round fills caches, and is never the best one.
        before = time.process_time()
        for index in range(count):
            ask(index)
        best = min(best, time.process_time() - before)
    return round(best / count * 1e3, 3)


if __name__ == "__main__":
    sys.exit(main())
