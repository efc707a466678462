"""Time searches for layouts without devices: ``python benchmarks/tune_search.py``.

Three parts: a 32-layer LLaMA on 16 ranks and a 70B model on 1,024 ranks, ranked by composition and confirmed
by dry runs; and plans of an interleaved pipeline beside the same one without chunks. Seconds of the clock
stand beside those of the processor, which a busy machine changes little, and the load beside both. For the
large model the layout that is usually started is planned too, and the report's terms say what it loses.
"""

from __future__ import annotations

import argparse
import os
import resource
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from machine import busy_processors, update

from mindspeed_core.registry import Registry
from mindspeed_tune.candidate import (
    CONTEXT,
    LAYERS_PER_CHUNK,
    MICRO_BATCH,
    PIPELINE,
    TENSOR,
    ZERO,
    Candidate,
)
from mindspeed_tune.driver import Ranks, records_of
from mindspeed_tune.hardware import read_hardware
from mindspeed_tune.journal import Journal
from mindspeed_tune.launch_command import LaunchCommand, read_command
from mindspeed_tune.launch_plan import LaunchPlan, make_plan
from mindspeed_tune.ranked import Ranked
from mindspeed_tune.search import Search
from mindspeed_tune.space_file import Space
from mindspeed_tune.threads import processors
from mindspeed_tune.warm_process import WarmProcess

HARDWARE, PLATFORM = "h100", "fake-cuda"
CONFIRMED = 10
MOST_RANKING, MOST_CONFIRMING = 60.0, 300.0
"""Seconds in which the list of the small search should be there, and its best ten confirmed, on two cores."""
MOST_BYTES, MOST_SECONDS = 0.005, 0.03
_LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --bf16 --mock-data "
    "--train-iters 10 --lr 1e-4 --use-flash-attn --use-fused-rmsnorm --use-fused-swiglu "
    "--use-fused-rotary-pos-emb --micro-batch-size 1 --use-distributed-optimizer"
)
_7B = (
    "mindspeed-train --fake-world-size 16 --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 "
    "--num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 --vocab-size 32000 "
    f"--global-batch-size 128 {_LLAMA}"
)
_70B = (
    "mindspeed-train --fake-world-size 1024 --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 "
    "--num-attention-heads 64 --group-query-attention --num-query-groups 8 --seq-length 4096 "
    f"--max-position-embeddings 4096 --vocab-size 32000 --global-batch-size 512 {_LLAMA}"
)
_USUAL = {TENSOR: 8, PIPELINE: 8, CONTEXT: 1, MICRO_BATCH: 1, ZERO: True}
"""The layout in which models of this size are usually started: tensor parallelism fills a node."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and write them; status 1 where a bound is missed on an idle machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="parts whose name contains one of these")
    parser.add_argument("--print-only", action="store_true", help="do not write benchmarks/results")
    parser.add_argument(
        "--confirmed", type=int, default=CONFIRMED, help="layouts planned directly, for a try"
    )
    parser.add_argument("--seconds", type=float, default=900.0, help="after which a search begins no plan")
    parser.add_argument("--folder", type=Path, help="of journals, from which a search that was ended goes on")
    chosen = parser.parse_args(arguments)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "LLaMA of 32 layers, 16 ranks": partial(
            searched, _7B, chosen.confirmed, chosen.seconds, chosen.folder and chosen.folder / "7b"
        ),
        "70B, 1,024 ranks": partial(
            searched,
            _70B,
            chosen.confirmed,
            chosen.seconds,
            chosen.folder and chosen.folder / "70b",
            usual=_USUAL,
        ),
        "interleaved plans": interleaved,
    }
    status = 0
    for name, measure in parts.items():
        if chosen.only and not any(part in name for part in chosen.only):
            continue
        free = processors() - busy_processors()
        found = {**measure(), "free_processors_before": round(free, 1)}
        for key, value in found.items():
            print(f"{name}: {key}: {value}", flush=True)
        # Bounds in seconds are judged where nothing else runs.
        status |= int(not found.pop("within_bounds") and free > 1.5)
        if not chosen.print_only:
            update("tune_search", {name: found})
    return status


class Clock:
    """Seconds of the clock, of this process and of processes that ran ranks, since it was made."""

    def __init__(self) -> None:
        self._began = self._now()

    def seconds(self) -> dict[str, float]:
        """Return the three of them."""
        names = ("clock", "cpu_of_search", "cpu_of_dry_runs")
        return {name: round(a - b, 1) for name, a, b in zip(names, self._now(), self._began)}

    def _now(self) -> tuple[float, float, float]:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.monotonic(), time.process_time(), used.ru_utime + used.ru_stime


def searched(
    command: str,
    trials: int,
    seconds: float,
    folder: Path | None,
    usual: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Search for the layouts of a command; return what it took and what it found."""
    clock = Clock()
    stages: dict[str, dict[str, float]] = {}

    def say(text: str) -> None:
        print(f"{clock.seconds()['clock']:7.1f} s  {text}", flush=True)
        if "ranked by composition" in text:
            stages["ranked"] = clock.seconds()

    facts = {"benchmark of": command}
    with Journal(folder, facts) as journal, WarmProcess(PLATFORM) as process:
        search = Search(
            read_command(shlex.split(command), {}),
            Space(),
            read_hardware(HARDWARE),
            process,
            journal,
            Registry.discover(),
            trials=trials,
            deadline=time.monotonic() + seconds,
            say=say,
        )
        best = search.run()
        stages["confirmed"] = clock.seconds()
        known = None if usual is None else with_settings(search, usual)
        planned = None if known is None else search.take(known.candidate, search.plan(known.candidate))
    # Children count when they are gone.
    stages["confirmed"] = {**stages["confirmed"], "cpu_of_dry_runs": clock.seconds()["cpu_of_dry_runs"]}
    found: dict[str, Any] = {
        "hardware": HARDWARE,
        "kernels": PLATFORM,
        # A search that goes on from a journal has spent most of its time before.
        "seconds": None if journal.remembered else stages,
        "planned": sum(one.planned for one in search.ranked.values()),
        "layouts": len(search.ranked) + len(search.unranked),
        "refused": {one.reason: one.count for one in search.validity.refused.values()},
        "cells": dict(search.trust.as_json(one.candidate for one in search.ranked.values())),
        "first": [described(one, best[0]) for one in best[:3]],
        "all_of_the_first_ten_planned": all(one.planned for one in best[:trials]),
        "composition": [str(one) for one in search.trust.compared.values()],
        "load": os.getloadavg()[0],
    }
    fast = stages["ranked"]["clock"] <= MOST_RANKING and stages["confirmed"]["clock"] <= MOST_CONFIRMING
    if planned is not None:
        found["usual"] = described(planned, best[0])
        found["usual_or_faster_in_the_first_three"] = any(
            one.estimate.seconds <= planned.estimate.seconds for one in best[:3]
        )
        fast = found["usual_or_faster_in_the_first_three"]
    return {**found, "within_bounds": fast and found["all_of_the_first_ten_planned"]}


def with_settings(search: Search, wanted: Mapping[str, Any]) -> Ranked:
    """Return the fastest candidate with some settings, and none of chunks and recomputation."""
    fitting = [
        one
        for one in search.ranked.values()
        if all(one.candidate.settings.get(flag) == value for flag, value in wanted.items())
        and not one.candidate.settings.get(LAYERS_PER_CHUNK)
    ]
    return min(fitting, key=lambda one: one.estimate.seconds)


def described(one: Ranked, best: Ranked) -> dict[str, Any]:
    """Return a layout with its seconds, and by which terms it differs from the best one."""
    estimate = one.estimate
    return {
        "layout": one.candidate.label,
        "seconds": round(estimate.seconds, 3),
        "gib": round(estimate.needed / 2**30, 1),
        "mfu": estimate.mfu and round(estimate.mfu, 3),
        "source": estimate.source,
        "terms": {name: round(value, 3) for name, value in estimate.terms.items()},
        "slower_by": {
            name: round(value - best.estimate.terms[name], 3) for name, value in estimate.terms.items()
        },
    }


def interleaved() -> dict[str, Any]:
    """Plan a pipeline plainly, in chunks with layers reduced, and in chunks with all layers."""
    layout = {TENSOR: 2, "--sequence-parallel": True, PIPELINE: 4, ZERO: True}
    found: dict[str, Any] = {}
    plans: dict[str, LaunchPlan] = {}
    hardware = read_hardware(HARDWARE)
    command = read_command(shlex.split(_7B), {})
    from mindspeed_core.flags.flag_set import known_flags

    flags = known_flags(Registry.discover())
    with WarmProcess(PLATFORM) as process:
        # What the process imports before its first rank is no part of a plan.
        _records(Candidate(layout).command(command, flags), process, exact=False)
        for name, chunk, exact in (
            ("plain", None, False),
            ("chunks of 4", 4, False),
            ("chunks of 4, all layers", 4, True),
        ):
            one = Candidate({**layout, LAYERS_PER_CHUNK: chunk}).command(command, flags)
            began = time.monotonic()
            records = _records(one, process, exact)
            plans[name] = make_plan(one.text, records, hardware, 8)
            found[name] = {
                "clock": round(time.monotonic() - began, 1),
                "cpu": round(sum(record.cost["cpu_seconds"] for record in records), 1),
                "ranks": len(records),
            }
    reduced, direct = plans["chunks of 4"], plans["chunks of 4, all layers"]
    off = {
        "bytes": max(
            abs(a.exact / b.exact - 1) for a, b in zip(reduced.stages(), direct.stages(), strict=True)
        ),
        "seconds": abs((reduced.step.seconds or 0.0) / (direct.step.seconds or 1.0) - 1),
    }
    good = off["bytes"] <= MOST_BYTES and off["seconds"] <= MOST_SECONDS
    return {**found, "reduced_against_all_layers": off, "within_bounds": good}


def _records(command: LaunchCommand, process: WarmProcess, exact: bool) -> list[Any]:
    with Ranks(command, process=process, reliefs=False, exact_layers=exact) as ranks:
        return records_of(ranks)


if __name__ == "__main__":
    raise SystemExit(main())
