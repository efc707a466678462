"""Trainings with split sequences on two value devices: equal to one process on the CPU, update included."""

from __future__ import annotations

import pytest

from mindspeed_cp.features import DECLARATIONS
from mindspeed_testing.npu import ScenarioWorlds, assert_equals_cpu, device_scenarios
from mindspeed_testing.npu.kernels.contract import SOCS

QUICK = (
    "ring",
    "ulysses",
    "fetched",
    "documents-ring",
    "fused-update",
    "by-token",
    "uneven-loss-per-token",
    "interleaved-angles",
)
TRAININGS = device_scenarios(DECLARATIONS, always=QUICK)


@pytest.fixture(scope="module")
def trained(asked_for):
    return ScenarioWorlds(asked_for("scenario"))


@pytest.mark.parametrize(("feature", "scenario"), TRAININGS)
def test_split_sequences_train_as_the_cpu(feature, scenario, trained):
    training = trained.assert_equals_cpu(scenario)
    assert feature in training.side.features
    if "--use-flash-attn" in scenario.flags:
        assert training.count("npu_fusion_attention") + training.count("npu_fusion_attention_v2")


@pytest.mark.thorough
@pytest.mark.parametrize("soc", [soc for soc in SOCS if soc != "910B"])
@pytest.mark.parametrize(("feature", "scenario"), [param for param in TRAININGS if not param.marks])
def test_split_sequences_train_as_the_cpu_on_other_generations(feature, scenario, soc):
    training = assert_equals_cpu(scenario, soc=soc)
    assert feature in training.side.features
