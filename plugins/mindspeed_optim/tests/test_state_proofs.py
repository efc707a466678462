"""Proofs of CAdam, averaged weights and quantised moments."""

import pytest

from mindspeed_core.testing.scenarios import scenario_parameters
from mindspeed_core.testing.verify import verify
from mindspeed_optim.features.cadam import CAdamOptimizer
from mindspeed_optim.features.ema import EmaOptimizer
from mindspeed_optim.features.quant_states import QuantStates

DECLARATIONS = (CAdamOptimizer, EmaOptimizer, QuantStates)
ALWAYS = ()


@pytest.mark.parametrize(
    ("feature", "scenario"), scenario_parameters(DECLARATIONS, platform="cpu", always=ALWAYS)
)
def test_scenarios(feature, scenario):
    verdict = verify(feature, scenario, platform="cpu")
    assert verdict.passed, str(verdict)
