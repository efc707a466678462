"""Declarations of recipes and of Gemma's parts: sound, documented, proved."""

import pytest

from mindspeed_models.features import GatedGelu, ModelRecipes, NoGate, PaddedVocabulary, ScaledEmbedding
from mindspeed_testing.scenarios import scenario_parameters
from mindspeed_testing.verify import verify

ALWAYS = ("gated-gelu-tp2-sp",)
FEATURES = (ModelRecipes, PaddedVocabulary, NoGate, GatedGelu, ScaledEmbedding)


@pytest.mark.parametrize(("feature", "scenario"), scenario_parameters(FEATURES, always=ALWAYS))
def test_proofs_hold(feature, scenario):
    result = verify(feature, scenario)
    assert result.passed, str(result)
