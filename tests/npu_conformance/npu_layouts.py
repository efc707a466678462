"""Layouts of more than one kind of group on four value devices: a group's size is not the world's."""

from __future__ import annotations

import pytest

from mindspeed_core.feature import Scenario
from mindspeed_testing.npu import ScenarioWorlds

MODEL = (
    *("--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm", "--position-embedding-type", "rope"),
    *("--micro-batch-size", "1", "--global-batch-size", "4"),
)
KERNELS = ("--use-flash-attn", "--use-fused-rmsnorm", "--use-fused-swiglu", "--use-fused-rotary-pos-emb")
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
# Kernels with built-in communication sum over 256 numbers at least.
WIDE = ("--hidden-size", "512", "--ffn-hidden-size", "512", "--num-layers", "1", "--bf16")


def four_ranks(name: str, *flags: str, model: tuple[str, ...] = (), tolerance: float = 1e-5) -> Scenario:
    """Compare four value devices with one process on the CPU."""
    return Scenario(
        name,
        flags=(*MODEL, *model, *flags),
        baseline=(*MODEL, *model),
        world_size=4,
        baseline_world_size=1,
        steps=2,
        tolerance=tolerance,
    )


LAYOUTS = {
    scenario.name: scenario
    for scenario in (
        four_ranks("tp2-dp2", *TP2, *KERNELS, "--use-distributed-optimizer"),
        four_ranks("tp2-cp2", *TP2, *KERNELS, "--context-parallel-size", "2"),
        # Half precision on both sides, of other sums.
        four_ranks("tp2-dp2-built-in", *TP2, "--use-ascend-mc2", model=WIDE, tolerance=8e-2),
        four_ranks("tp2-pp2", *TP2, *KERNELS, "--pipeline-model-parallel-size", "2"),
    )
}
USED = {
    "tp2-dp2": ("npu_fusion_attention", "npu_rms_norm", "npu_swiglu"),
    "tp2-cp2": ("npu_fusion_attention",),
    "tp2-dp2-built-in": ("npu_all_gather_base_mm", "npu_mm_reduce_scatter_base"),
    "tp2-pp2": ("npu_fusion_attention", "npu_rms_norm", "npu_swiglu"),
}


@pytest.fixture(scope="module")
def trained(asked_for):
    return ScenarioWorlds(LAYOUTS[name] for name in LAYOUTS if name in asked_for("name"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_of_several_groups_trains_as_one_process(name, trained):
    training = trained.assert_equals_cpu(LAYOUTS[name])
    assert [operation for operation in USED[name] if not training.count(operation)] == []
