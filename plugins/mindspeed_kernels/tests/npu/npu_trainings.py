"""Trainings with every feature of this package on value devices: equal to the CPU, update included."""

from __future__ import annotations

import pytest
from device_kernels import IN_FLOAT32

from mindspeed_kernels.features import DECLARATIONS
from mindspeed_testing.npu import ScenarioWorlds, assert_equals_cpu, device_scenarios
from mindspeed_testing.npu.kernels.contract import SOCS

TRAININGS = device_scenarios(DECLARATIONS, first=2)
"""An ordinary run trains the first of a feature on one rank, and on two."""


@pytest.fixture(scope="module")
def trained(asked_for):
    return ScenarioWorlds(asked_for("scenario"))


@pytest.mark.parametrize(("feature", "scenario"), TRAININGS)
def test_a_feature_trains_as_the_cpu(feature, scenario, trained):
    training = trained.assert_equals_cpu(scenario)
    assert feature in training.side.features
    if "--bf16" not in scenario.flags:
        assert [name for name in IN_FLOAT32.get(feature, ()) if not training.count(name)] == []


def on_two_ranks():
    """One scenario of each feature, of two ranks where there is one."""
    chosen = {}
    for feature, scenario in (param.values for param in TRAININGS):
        if feature not in chosen or chosen[feature].world_size < scenario.world_size:
            chosen[feature] = scenario
    return [pytest.param(feature, scenario, id=feature) for feature, scenario in chosen.items()]


@pytest.mark.thorough
@pytest.mark.parametrize("soc", [soc for soc in SOCS if soc != "910B"])
@pytest.mark.parametrize(("feature", "scenario"), on_two_ranks())
def test_a_feature_trains_as_the_cpu_on_other_generations(feature, scenario, soc):
    training = assert_equals_cpu(scenario, soc=soc)
    assert feature in training.side.features
