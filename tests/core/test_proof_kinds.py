"""A feature that changes the training has an honest proof, and the proof of its broken variant fails."""

from dataclasses import replace

import proof_toys
import pytest

from acme_five.features import DECLARATIONS, GatedNorms, ZLoss
from mindspeed_core.feature import Resume, Scenario
from mindspeed_testing.verify import verify

SOUND = {feature.name: feature for feature in DECLARATIONS[1:]}
THOROUGH = {
    ("acme-gated-norm", "resume"),
    ("acme-z-loss", "nothing-weighs"),
    ("acme-z-loss", "resume"),
    ("acme-lion", "dp2-sharded"),
    ("acme-lines", "dp2"),
}
"""Proofs whose kind and layout others have too."""


def proof(feature, name):
    return next(scenario for scenario in feature.verify if scenario.name == name)


def prove(variant, name):
    """The verdict of a broken variant."""
    return verify(variant, proof(variant, name), declarations=[f"proof_toys:{variant.__name__}"])


@pytest.mark.parametrize(
    ("feature", "name"),
    [
        pytest.param(
            feature.name,
            scenario.name,
            marks=[pytest.mark.thorough] * ((feature.name, scenario.name) in THOROUGH),
        )
        for feature in SOUND.values()
        for scenario in feature.verify
        for named in [(feature.name, scenario.name)]
    ],
)
def test_a_sound_feature_is_proved(feature, name):
    verdict = verify(SOUND[feature], proof(SOUND[feature], name))
    assert verdict.passed, str(verdict)


def test_an_average_of_stale_parameters_is_caught():
    verdict = prove(proof_toys.StaleAverage, "dp2-sharded")
    assert any(line.startswith("feature state: features.acme-average.") for line in verdict.differences)


def test_an_average_that_is_lost_is_caught_although_the_training_is_the_same():
    verdict = prove(proof_toys.ForgottenAverage, "resume")
    assert {line.split(": ")[1] for line in verdict.differences} == {"feature state"}


def test_a_gradient_of_a_part_of_the_sequence_is_caught():
    verdict = prove(proof_toys.UnmarkedNorms, "tp2-sp")
    assert not verdict.passed
    assert any(line.startswith("gradients of step 1: ") and ".gate" in line for line in verdict.differences)


def test_a_loss_that_weighs_with_the_ranks_is_caught():
    verdict = prove(proof_toys.ZLossOfRanks, "tp2-sp")
    assert any(line.startswith("gradients of step 1: ") for line in verdict.differences)


def test_a_loss_that_is_not_declared_as_an_extra_one_is_a_difference():
    undeclared = replace(proof(ZLoss, "nothing-weighs"), extra_losses=())
    assert verify(ZLoss, undeclared).differences == ("z loss: length: 3 numbers against 0",)


def test_a_data_source_that_begins_anew_is_caught():
    verdict = prove(proof_toys.LinesFromTheFirst, "resume")
    assert any(line.startswith("resumed in the same layout: lm loss: ") for line in verdict.differences)


def test_a_schedule_that_begins_anew_is_caught():
    verdict = prove(proof_toys.ExponentialOfCalls, "resume")
    wrong = "resumed in the same layout: learning rates of step 2"
    assert any(line.startswith(wrong) for line in verdict.differences)


def test_a_momentum_outside_of_the_checkpoint_is_caught():
    verdict = prove(proof_toys.ForgetfulLion, "resume")
    assert any(line.startswith("resumed in the same layout: parameters: ") for line in verdict.differences)


def test_state_that_differs_between_ranks_is_caught():
    verdict = prove(proof_toys.RankState, "dp2")
    where = "feature state, copies on several ranks: features.toy-rank-state"
    found = [line for line in verdict.differences if line.startswith(where)]
    assert sorted(line.split(": ")[1] for line in found) == [
        "features.toy-rank-state.name",
        "features.toy-rank-state.rank",
    ]
    assert len(found) == len(verdict.differences)


def test_a_quantity_that_is_named_and_that_nobody_has_proves_nothing():
    empty = replace(proof(GatedNorms, "closed-gates"), compare=("feature state",))
    assert verify(GatedNorms, empty).differences == (
        "compare: feature state: is among what the proof compares, but neither side has any",
    )


def test_what_another_optimizer_loads_is_compared_and_its_warning_is_demanded():
    flags = ("--optimizer", "acme-lion")
    resume = Resume(("--optimizer", "adam"), steps=0, with_feature=False, warning="of nothing like it")
    scenario = Scenario("into-adam", flags, steps=1, tolerance=0.0, resume=resume)
    verdict = verify(SOUND["acme-lion"], scenario)
    # Parameters and moments agree; all that is missing is the warning.
    (difference,) = verdict.differences
    assert difference.startswith("resumed in the other layout: load: does not warn of 'of nothing like it'")
    assert "kept no exp_avg_sq" in difference
    assert {name for sides in verdict.sides for name, count in sides.quantities.items() if count} == {
        "parameters",
        "optimizer state",
    }
