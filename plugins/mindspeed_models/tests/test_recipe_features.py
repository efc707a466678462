"""Declarations of recipes and of Gemma's parts: sound, documented, proved."""

from importlib.resources import files

import pytest

from mindspeed_core import check_feature
from mindspeed_models.features import GatedGelu, ModelRecipes, NoGate, PaddedVocabulary, ScaledEmbedding
from mindspeed_testing.scenarios import scenario_parameters
from mindspeed_testing.verify import verify

ALWAYS = ("gated-gelu-tp2-sp",)
FEATURES = (ModelRecipes, PaddedVocabulary, NoGate, GatedGelu, ScaledEmbedding)


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_declarations_are_sound(feature):
    assert check_feature(feature) == []


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_every_feature_has_its_page(feature):
    package, _, path = feature.docs.partition(":")
    page = files(package).joinpath(path).read_text(encoding="utf-8")
    assert all(option in page for flag in feature.flags for option in flag.options)


@pytest.mark.parametrize(("feature", "scenario"), scenario_parameters(FEATURES, always=ALWAYS))
def test_proofs_hold(feature, scenario):
    result = verify(feature, scenario)
    assert result.passed, str(result)
