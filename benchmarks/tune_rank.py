"""Rank layouts by predicted steps, and measure them: ``python benchmarks/tune_rank.py --processes 2``.

A small GPT in every layout of a few processes, one thread each. The machine's numbers are fitted to one run
of each dimension (``mindspeed-tune calibrate``) and judged on all other layouts. Beside them: microbenchmarks
alone, and a model by formulas as earlier tuners have it (work by parameters, a bubble, a bandwidth). Rounds
of the same measurement against each other bound what any prediction can reach. Where the machine has not as
many free processors as processes, times mean nothing: the program says so at once and ends with status 2,
or, with ``--anyway``, runs without judging.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from machine import busy_processors, update

from mindspeed_core.flags.flag_set import known_flags
from mindspeed_core.registry import Registry
from mindspeed_tune.calibrate import calibrate
from mindspeed_tune.candidate import Candidate
from mindspeed_tune.driver import Ranks, records_of
from mindspeed_tune.estimate import estimate_of
from mindspeed_tune.hardware import Hardware
from mindspeed_tune.journal import Journal
from mindspeed_tune.launch_command import read_command
from mindspeed_tune.launch_plan import LaunchPlan, make_plan
from mindspeed_tune.measure import Measured, Measuring, equal
from mindspeed_tune.search_report import rank_correlation
from mindspeed_tune.threads import processors
from mindspeed_tune.validity import Validity
from mindspeed_tune.warm_process import WarmProcess

LEAST_RANK, MOST_ERROR, MOST_LOST, MOST_BYTES = 0.85, 0.15, 0.05, 0.005
EXACT_BYTES = 1024
_NOISE = 0.3
"""Processors that a machine without anything to do is busy by."""
MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 "
    "--vocab-size 1024 --make-vocab-size-divisible-by 128 --attention-dropout 0 --hidden-dropout 0 "
    "--global-batch-size 8 --train-iters 60 --lr 1e-3 --mock-data --num-workers 0 --eval-iters 0 --swiglu "
    "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope --use-flash-attn "
    "--untie-embeddings-and-output-weights --micro-batch-size 1"
)
FULL = {"--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": 1}
TP, PP, EP = (f"--{name}-model-parallel-size" for name in ("tensor", "pipeline", "expert"))
CP, ZERO = "--context-parallel-size", "--use-distributed-optimizer"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"


def candidates(processes: int) -> list[Candidate]:
    """Return at least twenty layouts of 2 or 4 processes."""
    two: list[dict[str, Any]] = [
        {},
        {ZERO: True},
        {TP: 2},
        {TP: 2, "--sequence-parallel": True},
        {PP: 2},
        {PP: 2, "--num-layers-per-virtual-pipeline-stage": 1},
        {CP: 2, "--context-parallel-algo": "ulysses_cp_algo"},
    ]
    four = [
        *two,
        {TP: 4, "--sequence-parallel": True},
        {PP: 4},
        {TP: 2, PP: 2, "--sequence-parallel": True},
        {CP: 4, "--context-parallel-algo": "ulysses_cp_algo"},
        {TP: 2, CP: 2, "--context-parallel-algo": "ulysses_cp_algo", "--sequence-parallel": True},
    ]
    found = []
    for layout in four if processes == 4 else two:
        chunked = "--num-layers-per-virtual-pipeline-stage" in layout
        # Recomputation costs with them what it costs with their neighbours in the list.
        alike = ZERO in layout or layout == {TP: 2}
        for size in (1,) if chunked else (1, 4):
            for further in ({},) if alike and size > 1 else ({}, FULL):
                found.append(Candidate({**layout, "--micro-batch-size": size, **further}))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print how well layouts are ranked; status 1 where a bound is missed on a machine that can tell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, choices=(2, 4), default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most", type=int, help="layouts at most, for a try")
    parser.add_argument("--experts", action="store_true", help="a model with experts, and layouts of them")
    parser.add_argument("--print-only", action="store_true", help="do not write benchmarks/results")
    parser.add_argument("--folder", type=Path, help="of journals: an early end loses no measurement")
    parser.add_argument("--measure-only", action="store_true", help="into the folder, and judge later")
    parser.add_argument("--anyway", action="store_true", help="run also where nothing can be judged")
    chosen = parser.parse_args(arguments)
    load = os.getloadavg()[0]
    free = processors() - busy_processors()
    enough = processors() >= chosen.processes and free + _NOISE >= chosen.processes
    kind = f"{chosen.processes} processes{', experts' if chosen.experts else ''}"
    if not enough:
        why = (
            f"{chosen.processes} processes, {processors()} processors, {free:.1f} of them free: they would "
            "wait for each other, and nothing is judged. Run it where so many processors are free, or "
            "with --anyway to see that it runs"
        )
        print(why, flush=True)
        if not chosen.anyway:
            if not chosen.print_only:
                update("tune_rank", {kind: {"judged": False, "why": why}})
            return 2
    command = read_command(shlex.split(f"mindspeed-train --nproc {chosen.processes} {MODEL}"))
    tried = candidates(chosen.processes)
    if chosen.experts:
        command = read_command(shlex.split(f"mindspeed-train --nproc {chosen.processes} {MODEL} {EXPERTS}"))
        tried += [Candidate({**one.settings, EP: 2}) for one in tried if CP not in one.settings]
    registry = Registry.discover()
    validity = Validity(registry, command, "cpu")
    tried = [one for one in tried if validity.args_of(one) is not None][: chosen.most]
    for refused in validity.refused.values():
        print(f"left out, {refused.count}: {refused.reason}", flush=True)
    flags = known_flags(registry)
    facts = {"ranked command": list(command.text)}
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.folder or Path(temporary)
        with Journal(folder / "measured", facts) as journal:
            measuring = Measuring(command, flags, journal, limit=300.0, platform="cpu", say=say)
            measured = measuring.settle(tried, chosen.rounds, memory=True)
        calibrated = calibrate(
            command,
            folder=folder / "calibration",
            layers=None,
            limit=300.0,
            platform="cpu",
            target="fake",
            elsewhere=None,
            say=say,
        )
    if chosen.measure_only:
        return 0
    names = [one.name for one in tried if not measured[one.name].failure]
    plans = {}
    say(f"dry runs of {len(names)} layouts")
    with WarmProcess() as process:
        for candidate in tried:
            if candidate.name in names:
                with Ranks(candidate.command(command, flags), process=process, reliefs=False) as ranks:
                    plans[candidate.name] = records_of(ranks)

    def planned(hardware: Hardware) -> dict[str, LaunchPlan]:
        return {
            name: make_plan(command.text, records, hardware, command.ranks_per_node)
            for name, records in plans.items()
        }

    fitted = planned(calibrated.fit.hardware)
    others = [one.name for one in tried if one.name in names and not calibrates(one)]
    if len(others) < 3:
        print(f"{len(others)} layouts besides those of the calibration: nothing to compare", flush=True)
        return 2
    exact = [name for name in names if all(kind.step.exact for kind in fitted[name].kinds)]
    found = {
        "layouts": len(names),
        "judged_layouts": len(others),
        "calibrated_by": sorted(calibrated.fit.errors),
        "calibration_notes": list(calibrated.notes),
        "failed": {name: one.failure for name, one in measured.items() if one.failure},
        "load_before": load,
        "free_processors_before": free,
        "rounds": {name: len(measured[name].seconds) for name in names},
        "shortest_steps_repeat_within": max(measured[name].doubt for name in names),
        "rounds_against_each_other": between_rounds(measured, names),
        "fitted": judged({name: plan.step.seconds for name, plan in fitted.items()}, measured, others),
        "microbenchmarks": judged(
            {n: p.step.seconds for n, p in planned(calibrated.start).items()}, measured, others
        ),
        "formulas": judged({one.name: by_formulas(one) for one in tried}, measured, others),
        "seconds": {
            name: {
                "fitted": fitted[name].step.seconds,
                "terms": estimate_of(fitted[name]).terms,
                "measured": list(measured[name].seconds),
            }
            for name in names
        },
        "bytes_off": {name: bytes_off(fitted[name], measured[name]) for name in names},
        "exactly_planned": exact,
    }
    for name, value in found.items():
        print(f"{name}: {value}")
    one = found["fitted"]
    # A loss is told where the rounds of both layouts are closer to each other than the bound.
    told = one["first_and_best_repeat_within"] <= MOST_LOST
    good = (
        (one["rank_correlation"] or 0.0) >= LEAST_RANK
        and one["median_error"] <= MOST_ERROR
        and one["lost_by_the_first"] <= MOST_LOST
        and max(map(abs, found["bytes_off"].values())) <= MOST_BYTES
        and all(abs(found["bytes_off"][name] * (measured[name].peak or 0.0)) <= EXACT_BYTES for name in exact)
    )
    judging = enough and told
    if not chosen.print_only:
        update("tune_rank", {kind: {**found, "judged": judging, "within_bounds": judging and good}})
    if not enough:
        print("nothing is judged: the processes waited for each other", flush=True)
        return 2
    if not told:
        print(
            f"nothing is judged: rounds of the first and the best layout differ by "
            f"{one['first_and_best_repeat_within']:.0%}, and {MOST_LOST:.0%} of a step cannot be told; "
            "run it again on a quiet machine",
            flush=True,
        )
        return 2
    print("within all bounds" if good else "a bound is missed", flush=True)
    return int(not good)


def say(text: str) -> None:
    """Tell how far it is, at once also where output goes into a file."""
    print(text, flush=True)


def calibrates(candidate: Candidate) -> bool:
    """Return whether a layout is one that the numbers are fitted to."""
    settings = {name: value for name, value in candidate.settings.items() if name != "--micro-batch-size"}
    fitted = ({}, {TP: 2, "--sequence-parallel": True}, {PP: 2}, {EP: 2})
    return candidate.size("--micro-batch-size") == 1 and settings in fitted


def judged(
    predicted: Mapping[str, float | None], measured: Mapping[str, Measured], names: Sequence[str]
) -> dict[str, Any]:
    """Return how predictions compare with measurements."""
    pairs = [(predicted[name] or 0.0, measured[name].best) for name in names]
    first = measured[min(names, key=lambda name: predicted[name] or 0.0)]
    best = min((measured[name] for name in names), key=lambda one: one.best)
    return {
        "rank_correlation": rank_correlation(pairs),
        "median_error": statistics.median(abs(p / m - 1) for p, m in pairs),
        "lost_by_the_first": first.best / best.best - 1,
        "first_and_best_repeat_within": max(first.doubt, best.doubt),
        "first_is_equal_to_the_best": equal(first, best),
    }


def between_rounds(measured: Mapping[str, Measured], names: Sequence[str]) -> list[float | None]:
    """Return the rank correlation of every two rounds."""
    rounds = min(len(measured[name].seconds) for name in names)
    return [
        rank_correlation([(measured[n].seconds[a], measured[n].seconds[b]) for n in names])
        for a in range(rounds)
        for b in range(a)
    ]


def by_formulas(candidate: Candidate) -> float:
    """Return a step's time up to a factor: work, a third more to recompute, a bubble, 3 % for each call."""
    pp, size = candidate.size(PP), candidate.size("--micro-batch-size")
    split = candidate.size(TP) * candidate.size(CP)
    microbatches = max(1, 8 * split * pp // (size * 2))
    work = 4 / 3 if candidate.settings.get("--recompute-granularity") else 1.0
    return work * (1 + (pp - 1) / microbatches) * (1 + 0.03 * (split - 1) / size)


def bytes_off(plan: LaunchPlan, measured: Measured) -> float:
    """Return how far the planned peak of tensors is from the measured one."""
    peak = max(kind.fullest.exact + kind.record.backend.bytes for kind in plan.kinds)
    plain = max(kind.fullest.exact for kind in plan.kinds)
    assert measured.peak is not None
    return min((peak / measured.peak - 1, plain / measured.peak - 1), key=abs)


if __name__ == "__main__":
    sys.exit(main())
