"""Trainings with every feature of this package on value devices: equal to the CPU, update included."""

from __future__ import annotations

import pytest

from mindspeed_core.feature import Feature
from mindspeed_kernels.features import DECLARATIONS
from mindspeed_testing.npu import assert_equals_cpu
from mindspeed_testing.npu.kernels.contract import SOCS

KERNELS = {
    "fused-rmsnorm": ("npu_rms_norm", "npu_rms_norm_backward"),
    "fused-swiglu": ("npu_swiglu", "npu_swiglu_backward"),
    "fused-rope": ("npu_rotary_mul", "npu_rotary_mul_backward"),
    "flash-attn": ("npu_fusion_attention", "npu_fusion_attention_grad"),
    "fusion-attn-v2": ("npu_fusion_attention_v2", "npu_fusion_attention_grad_v2"),
    "alibi": ("npu_fusion_attention_v2", "npu_fusion_attention_grad_v2"),
    "grouped-experts": ("npu_grouped_matmul",),
}
"""Operations of the device that must have run for a feature to be what its name says, in float32."""

QUICK = 2
"""Scenarios of a feature that an ordinary run trains: on one rank, and on two."""


def trainings():
    """The scenarios of at most two ranks that are no matter of checkpoints."""
    for feature in DECLARATIONS:
        if not (isinstance(feature, type) and issubclass(feature, Feature)):
            continue
        found = [s for s in feature.verify if s.world_size <= 2 and s.resume is None]
        for index, scenario in enumerate(found):
            marks = () if index < QUICK else (pytest.mark.thorough,)
            yield pytest.param(feature.name, scenario, id=f"{feature.name}-{scenario.name}", marks=marks)


@pytest.mark.parametrize(("feature", "scenario"), trainings())
def test_a_feature_trains_as_the_cpu(feature, scenario):
    training = assert_equals_cpu(scenario, tolerance=max(scenario.tolerance, 1e-5))
    assert feature in training.side.features
    if "--bf16" not in scenario.flags:
        assert [name for name in KERNELS.get(feature, ()) if not training.count(name)] == []


def on_two_ranks():
    """One scenario of each feature, of two ranks where there is one."""
    chosen = {}
    for feature, scenario in (param.values for param in trainings()):
        if feature not in chosen or chosen[feature].world_size < scenario.world_size:
            chosen[feature] = scenario
    return [pytest.param(feature, scenario, id=feature) for feature, scenario in chosen.items()]


@pytest.mark.thorough
@pytest.mark.parametrize("soc", [soc for soc in SOCS if soc != "910B"])
@pytest.mark.parametrize(("feature", "scenario"), on_two_ranks())
def test_a_feature_trains_as_the_cpu_on_other_generations(feature, scenario, soc):
    training = assert_equals_cpu(scenario, soc=soc, tolerance=max(scenario.tolerance, 1e-5))
    assert feature in training.side.features
