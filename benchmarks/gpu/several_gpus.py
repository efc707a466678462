"""Trainings on two GPUs and more over NCCL: layouts against one process, and what overlaps gain.

Layouts train in float32 and must equal one process. Overlaps train in bf16, with and without, in turns, at a
size at which communication takes a while: the median step of each side stands in the rows. In a smoke run two
ranks on CPU take the part of the GPUs, over gloo.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from report import Report

from mindspeed_testing.training import train_side
from mindspeed_testing.verify import assert_equivalent

_TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
_PP2 = ("--pipeline-model-parallel-size", "2")
_CP2 = ("--context-parallel-size", "2")
_EP2 = ("--expert-model-parallel-size", "2")
_SHARDED = ("--use-distributed-optimizer",)
_OVERLAPPED = (*_SHARDED, "--overlap-grad-reduce", "--overlap-param-gather")
_LLAMA = (
    *("--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm", "--position-embedding-type", "rope"),
    *("--use-fused-rmsnorm", "--use-fused-swiglu", "--use-flash-attn"),
)
_EXPERTS = (
    *("--swiglu", "--disable-bias-linear", "--num-experts", "8", "--moe-router-topk", "2"),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-grouped-gemm"),
)
_ROTARY = ("--position-embedding-type", "rope")


@dataclass(frozen=True)
class Layout:
    """A layout that must train as one process does.

    Attributes:
        name: what is divided.
        flags: of the layout.
        ranks: that it needs at least; with more GPUs the others are data-parallel.
        model: flags of both sides.
    """

    name: str
    flags: tuple[str, ...]
    ranks: int = 2
    model: tuple[str, ...] = ()


LAYOUTS = (
    Layout("tensor and sequence parallel", _TP2),
    Layout("data parallel, distributed optimizer", _SHARDED),
    Layout("data parallel, overlapped", _OVERLAPPED),
    Layout("pipeline parallel", _PP2),
    Layout("pipeline parallel, interleaved", (*_PP2, "--num-layers-per-virtual-pipeline-stage", "1")),
    Layout("context parallel, ring", _CP2, model=_ROTARY),
    Layout("context parallel, Ulysses", (*_CP2, "--context-parallel-algo", "ulysses_cp_algo"), model=_ROTARY),
    Layout("expert parallel", _EP2, model=_EXPERTS),
    Layout("tensor and pipeline parallel", (*_TP2, *_PP2), ranks=4),
    Layout("tensor and context parallel", (*_TP2, *_CP2), ranks=4, model=_ROTARY),
    Layout("expert and pipeline parallel", (*_EP2, *_PP2), ranks=4, model=_EXPERTS),
    Layout("tensor, pipeline and data parallel", (*_TP2, *_PP2, *_OVERLAPPED), ranks=8),
)


@dataclass(frozen=True)
class Overlap:
    """Two command lines that differ in an overlap.

    Attributes:
        name: what overlaps.
        model: flags of both sides.
        flags: of the side that overlaps.
        baseline: of the other side.
        ranks: processes of both sides.
        feature: that has to be active with ``flags``; empty for an overlap of megatron-core.
    """

    name: str
    model: tuple[str, ...]
    flags: tuple[str, ...]
    baseline: tuple[str, ...] = ()
    ranks: int = 2
    feature: str = ""


OVERLAPS = (
    Overlap("reduction of gradients and gathering of parameters", _LLAMA, _OVERLAPPED, _SHARDED),
    Overlap(
        "tensor parallel: products and communication in parts",
        (*_LLAMA, *_TP2),
        ("--use-ascend-coc", "--coc-parallel-num", "4"),
        feature="coc",
    ),
    Overlap(
        "experts: exchange beside products",
        (*_EXPERTS, *_EP2),
        ("--moe-alltoall-overlap-comm",),
        feature="moe-alltoall-overlap",
    ),
    Overlap(
        "experts: forward beside backward",
        (*_EXPERTS, *_EP2),
        ("--moe-fb-overlap",),
        feature="moe-fb-overlap",
    ),
    Overlap(
        "context parallel: the next keys while these are used",
        (*_LLAMA, *_CP2),
        ("--use-cp-send-recv-overlap",),
    ),
    Overlap(
        "pipeline: sending beside computing",
        (*_LLAMA, *_PP2, "--num-layers-per-virtual-pipeline-stage", "2"),
        (),
        ("--no-overlap-p2p-communication",),
    ),
)
_SIZES = (
    *("--bf16", "--num-layers", "8", "--hidden-size", "2048", "--ffn-hidden-size", "5632"),
    *("--num-attention-heads", "16", "--seq-length", "4096", "--max-position-embeddings", "4096"),
    *("--vocab-size", "32000", "--micro-batch-size", "1", "--global-batch-size", "16"),
)
_TIMED, _ROUNDS = 6, 2


def measure(report: Report) -> None:
    """Compare each layout with one process, then time overlaps, as far as GPUs and time go."""
    gpus = 2 if report.smoke else len(report.facts["gpus"])
    if gpus < 2:
        report.facts["not_run"] = report.headline = "one GPU: not run"
        report.row("two GPUs are needed", gpus=gpus)
        return
    late: list[str] = []
    for layout in LAYOUTS[: 1 if report.smoke else None]:
        if layout.ranks <= gpus and report.remaining() > 30:
            equal(report, layout)
        elif layout.ranks <= gpus:
            late.append(layout.name)
    for overlap in () if report.smoke else OVERLAPS:
        if overlap.ranks <= gpus and report.remaining() > 60:
            gain(report, overlap)
        else:
            late.append(overlap.name)
    report.facts["left_out"] = {
        "no time": late,
        f"more than {gpus} GPU(s)": [layout.name for layout in LAYOUTS if layout.ranks > gpus],
    }
    failed = sum(row["passed"] is False for row in report.rows)
    report.headline = f"{failed} of {len(report.rows)} rows failed on {gpus} GPUs; {len(late)} found no time"


def equal(report: Report, layout: Layout) -> None:
    """Compare a layout with one process."""
    with report.check(layout.name) as found:
        verdict = assert_equivalent(
            (*layout.model, *layout.flags),
            layout.model,
            world_size=layout.ranks,
            baseline_world_size=1,
            tolerance=1e-4,
            platform=report.platform,
            timeout=90.0,
        )
        found |= {"largest_error": verdict.largest_error, "compared": verdict.compared}


def gain(report: Report, overlap: Overlap) -> None:
    """Time a training with an overlap and without it, in turns; the rows' ratio is with over without."""
    sides = {"with": overlap.flags, "without": overlap.baseline}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    with report.check(f"{overlap.name}: both sides train"):
        for _ in range(_ROUNDS):
            for name, flags in sides.items():
                side = train_side(
                    (*_SIZES, *overlap.model, *flags),
                    overlap.ranks,
                    steps=1,
                    gradients=False,
                    timed_steps=_TIMED,
                    platform=report.platform,
                    timeout=120.0,
                )
                seconds[name].append(side.measures["step_seconds"])
                if overlap.feature:
                    assert (overlap.feature in side.features) == (name == "with"), "it is not active"
    if all(seconds.values()):
        ours, theirs = (statistics.median(seconds[name]) for name in sides)
        report.row(f"{overlap.name}: step", ours=ours, theirs=theirs, unit="s", rounds=str(seconds))
