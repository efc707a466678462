"""A dry run holds and communicates what a world that computes does, rank by rank."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from mindspeed_core import Feature, Flag, hookimpl
from mindspeed_testing import WorldError
from mindspeed_testing.dry_run import differences, measure_layouts, measure_world

PADDED_EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--expert-model-parallel-size", "2"),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-expert-capacity-factor", "1.0"),
    "--moe-pad-expert-input-to-capacity",
)
LATENT = (
    *("--multi-latent-attention", "--normalization", "RMSNorm", "--position-embedding-type", "rope"),
    *("--untie-embeddings-and-output-weights", "--disable-bias-linear", "--swiglu"),
)
FUSED = (
    *("--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear", "--position-embedding-type", "rope"),
    *("--use-flash-attn", "--use-fused-rmsnorm", "--use-fused-swiglu", "--use-fused-rotary-pos-emb"),
)
SMALLER = ("--num-layers", "2")
TOGETHER = {
    "distributed optimizer": (*SMALLER, "--use-distributed-optimizer", "--bf16", "--overlap-grad-reduce"),
    "float16": (*SMALLER, "--use-distributed-optimizer", "--fp16", "--initial-loss-scale", "1024"),
    "tensor and sequence": (*SMALLER, "--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "interleaved": (*("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"),),
    "split sequence": (*SMALLER, "--context-parallel-size", "2", "--position-embedding-type", "rope"),
    "padded experts": (*SMALLER, *PADDED_EXPERTS),
}
APART = {
    "two replicas": (),
    "pipeline": ("--pipeline-model-parallel-size", "2"),
    "full recompute": (
        *("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
    ),
    "latent attention": LATENT,
    "further tokens": ("--mtp-num-layers", "1", "--position-embedding-type", "rope"),
    "fused kernels": FUSED,
    "fused kernels, tensor parallel": (*FUSED, "--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "further tokens, pipeline": (
        *("--mtp-num-layers", "1", "--position-embedding-type", "rope"),
        *("--untie-embeddings-and-output-weights", "--pipeline-model-parallel-size", "2"),
    ),
}


@pytest.fixture(scope="module")
def measured(asked_for):
    layouts = {name: flags for name, flags in TOGETHER.items() if name in asked_for("layout")}
    sides = [
        measure_layouts(list(layouts.values()), 2, platform=name, timeout=400) for name in ("cpu", "fake")
    ]
    return dict(zip(layouts, zip(*sides)))


@pytest.mark.parametrize("layout", TOGETHER)
def test_a_dry_run_has_the_bytes_and_calls_of_the_real_one(measured, layout):
    computed, planned = measured[layout]

    assert differences(computed, planned) == []
    assert computed[0].calls


@pytest.mark.thorough
@pytest.mark.parametrize("layout", APART)
def test_a_dry_run_of_a_further_layout_is_right_too(layout):
    computed, planned = (measure_world(APART[layout], 2, platform=name) for name in ("cpu", "fake"))

    assert differences(computed, planned) == []
    assert computed[0].calls


WITHOUT_SOCKETS = """
import socket, sys

def refuse(*args, **options):
    raise AssertionError("a dry run opens no socket")

socket.socket.connect = socket.socket.bind = refuse
from mindspeed_train.program import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_dry_run_of_the_program_reads_writes_and_opens_nothing(tmp_path):
    model = "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64"
    length = "--micro-batch-size 1 --global-batch-size 4 --train-iters 1000 --lr 1e-3 --save-interval 500"
    place = "--platform fake --fake-world-size 4 --fake-rank 3 --tensor-model-parallel-size 2"
    files = "--data-path nowhere --save saved --load loaded"
    command = [sys.executable, "-c", WITHOUT_SOCKETS, *f"{model} {length} {place} {files}".split()]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    assert "dry run of rank 3 of 4" in done.stdout
    assert "--load loaded was not read" in done.stdout
    assert "loss " not in done.stdout


class ShortReduction(Feature):
    """Sums 16-bit integers over the ranks of a model, which gloo does and NCCL does not."""

    name = "short-reduction"
    family = "test"
    summary = "Reduce what one backend does not."
    flags = (Flag("--short-reduction", help="Reduce it."),)

    @hookimpl(wrapper=True)
    def optimizer_step(self, run):
        dist.all_reduce(torch.ones(2, dtype=torch.int16, device=run.dist.device), group=run.pg.mp)
        return (yield)


def test_a_call_that_the_planned_backend_refuses_ends_the_dry_run_with_its_line():
    flags = ("--short-reduction", "--tensor-model-parallel-size", "2")
    declared = (f"{__name__}:ShortReduction",)

    with pytest.raises(WorldError, match="nccl refuses all_reduce of int16") as refused:
        measure_world(flags, 2, platform="fake-cuda", declarations=declared)

    assert "test_dry_run.py" in str(refused.value)
    assert len(measure_world(flags, 2, platform="fake", declarations=declared)) == 2
