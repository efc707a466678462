"""Proofs of the features: training with them is training without them, in fewer bytes."""

import pytest

from mindspeed_memory.features import DECLARATIONS
from mindspeed_testing.scenarios import scenario_parameters
from mindspeed_testing.verify import verify


@pytest.mark.parametrize(
    ("feature", "scenario"), scenario_parameters(DECLARATIONS, platform="cpu", always=())
)
def test_scenarios(feature, scenario):
    verdict = verify(feature, scenario, platform="cpu")
    assert verdict.passed, str(verdict)
