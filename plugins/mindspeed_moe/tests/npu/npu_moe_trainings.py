"""Trainings with overlapped experts on two value devices: equal to the CPU, update included."""

from __future__ import annotations

import pytest

from mindspeed_moe.features import DECLARATIONS
from mindspeed_testing.npu import assert_equals_cpu, device_scenarios
from mindspeed_testing.npu.kernels.contract import SOCS

QUICK = ("moe-alltoall-overlap-ep2", "moe-allgather-overlap-ep2")
ONE_BY_ONE = ("moe-pipe-experts",)
"""Features that multiply one expert's tokens while another's travel, so that no product is of groups."""
TRAININGS = device_scenarios(DECLARATIONS, always=QUICK)


@pytest.mark.parametrize(("feature", "scenario"), TRAININGS)
def test_overlapped_experts_train_as_the_cpu(feature, scenario):
    training = assert_equals_cpu(scenario)
    assert feature in training.side.features
    if "--moe-grouped-gemm" in scenario.flags and feature not in ONE_BY_ONE:
        assert training.count("npu_grouped_matmul")


@pytest.mark.thorough
@pytest.mark.parametrize("soc", [soc for soc in SOCS if soc != "910B"])
@pytest.mark.parametrize(("feature", "scenario"), [param for param in TRAININGS if not param.marks])
def test_overlapped_experts_train_as_the_cpu_on_other_generations(feature, scenario, soc):
    training = assert_equals_cpu(scenario, soc=soc)
    assert feature in training.side.features
