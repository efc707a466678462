"""Every feature with a kernel of the device, in a small GPT on platform npu, by the flags of its proofs."""

from __future__ import annotations

import pytest
from device_kernels import IN_FLOAT32

from mindspeed_core.discovery.feature_checks import declared_features
from mindspeed_kernels.features import DECLARATIONS
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.npu import shape_only_training

KERNELS = {
    **IN_FLOAT32,
    "masked-softmax": ("npu_scaled_masked_softmax", "npu_scaled_masked_softmax_backward"),
    "matmul-add": ("_npu_matmul_add_fp32",),
    "gmm-add": ("npu_grouped_matmul_add_",),
}
"""Operations of the device that must have run for a feature to be what its name says."""

# How many tokens an expert gets is a number that only a device knows, unless every expert gets as many.
_PADDED = ("--moe-expert-capacity-factor", "1.0", "--moe-pad-expert-input-to-capacity")
STATIC = {"grouped-experts": _PADDED, "gmm-add": (*_PADDED, "--bf16"), "matmul-add": ("--bf16",)}
"""Further flags, so that shapes do not depend on data, and kernels of half precision are asked."""

FEATURES = [feature for feature in declared_features(DECLARATIONS) if feature.name in KERNELS]


def chosen(feature):
    """The feature's first scenario of several processes without a pipeline, or else its first one."""
    # What differs between ranks, as stages and experts do, a world of one rank cannot have.
    differing = {"--pipeline-model-parallel-size", "--expert-model-parallel-size"}
    wide = [s for s in feature.verify if s.world_size > 1 and differing.isdisjoint(s.flags)]
    return (wide or feature.verify)[0]


@pytest.mark.parametrize(
    ("feature", "scenario"),
    [
        pytest.param(feature, scenario, id=f"{feature.name}-{scenario.name}")
        for feature in FEATURES
        for scenario in [chosen(feature)]
    ],
)
def test_a_feature_trains_every_parameter(feature, scenario):
    flags = training_flags([*scenario.flags, *STATIC.get(feature.name, ())], train_iters=1)
    with shape_only_training(flags, world_size=scenario.world_size) as training:
        assert feature.name in training.session.plan.names
        record = training.step()
    assert record.without_gradient == ()
    assert [name for name in KERNELS[feature.name] if not record.count(name)] == []
