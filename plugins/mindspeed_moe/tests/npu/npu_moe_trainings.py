"""Trainings with overlapped experts on two value devices: equal to the CPU, update included."""

from __future__ import annotations

import pytest

from mindspeed_moe.features import DECLARATIONS
from mindspeed_testing.npu import assert_equals_cpu, device_scenarios

QUICK = ("moe-alltoall-overlap-ep2", "moe-allgather-overlap-ep2")


@pytest.mark.parametrize(("feature", "scenario"), device_scenarios(DECLARATIONS, always=QUICK))
def test_overlapped_experts_train_as_the_cpu(feature, scenario):
    training = assert_equals_cpu(scenario)
    assert feature in training.side.features
    if "--moe-grouped-gemm" in scenario.flags:
        assert training.count("npu_grouped_matmul")
