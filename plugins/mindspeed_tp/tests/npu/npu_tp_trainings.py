"""Tensor parallelism on two value devices: trains as the CPU does, and calls the kernels it should."""

from __future__ import annotations

import pytest

from mindspeed_testing.npu import ScenarioWorlds, device_scenarios
from mindspeed_tp.features import DECLARATIONS

TRAININGS = device_scenarios(DECLARATIONS, always=("tp2-sp", "tp2", "level2-sp", "1x2", "bf16"))


@pytest.fixture(scope="module")
def trained(asked_for):
    return ScenarioWorlds(asked_for("scenario"))


@pytest.mark.parametrize(("feature", "scenario"), TRAININGS)
def test_tensor_parallelism_trains_as_the_cpu(feature, scenario, trained):
    training = trained.assert_equals_cpu(scenario)
    assert feature in training.side.features
    half = "--bf16" in scenario.flags
    if feature == "mc2" and half and "--sequence-parallel" in scenario.flags:
        gathered, scattered = "npu_all_gather_base_mm", "npu_mm_reduce_scatter_base"
        # Two column linears forward and two row linears backward gather; two row linears forward scatter.
        assert training.count(gathered) == 2 * training.count(scattered) > 0
