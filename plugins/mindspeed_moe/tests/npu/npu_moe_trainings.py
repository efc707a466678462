"""Trainings with overlapped experts on two value devices: equal to the CPU, update included."""

from __future__ import annotations

import pytest

from mindspeed_core.feature import Feature
from mindspeed_moe.features import DECLARATIONS
from mindspeed_testing.npu import assert_equals_cpu

QUICK = ("moe-alltoall-overlap-ep2", "moe-allgather-overlap-ep2")


def trainings():
    """The scenarios of at most two ranks that are no matter of checkpoints."""
    for feature in DECLARATIONS:
        if not (isinstance(feature, type) and issubclass(feature, Feature)):
            continue
        for scenario in feature.verify:
            if scenario.world_size > 2 or scenario.resume is not None:
                continue
            name = f"{feature.name}-{scenario.name}"
            marks = () if name in QUICK else (pytest.mark.thorough,)
            yield pytest.param(feature.name, scenario, id=name, marks=marks)


@pytest.mark.parametrize(("feature", "scenario"), trainings())
def test_overlapped_experts_train_as_the_cpu(feature, scenario):
    # Kernels of the device sum in another order than the CPU.
    training = assert_equals_cpu(scenario, tolerance=max(scenario.tolerance, 2e-5))
    assert feature in training.side.features
    if "--moe-grouped-gemm" in scenario.flags:
        assert training.count("npu_grouped_matmul")
