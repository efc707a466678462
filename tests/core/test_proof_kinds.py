"""A feature that changes the training has an honest proof, and the proof of its broken twin fails."""

from dataclasses import replace

import proof_toys
import pytest

from mindspeed_core.testing.verify import verify


def prove(feature, name):
    scenario = next(scenario for scenario in feature.verify if scenario.name == name)
    return verify(feature, scenario, declarations=[f"proof_toys:{feature.__name__}"])


@pytest.mark.parametrize(
    ("feature", "name"),
    [
        pytest.param(feature, scenario.name, id=f"{feature.name}-{scenario.name}")
        for feature in (
            proof_toys.GatedNorms,
            proof_toys.ZLoss,
            proof_toys.Lines,
            proof_toys.Halving,
            proof_toys.SignUpdates,
            proof_toys.Average,
        )
        for scenario in feature.verify
    ],
)
def test_a_sound_feature_is_proved(feature, name):
    verdict = prove(feature, name)
    assert verdict.passed, str(verdict)


def test_a_gradient_of_a_part_of_the_sequence_is_caught():
    verdict = prove(proof_toys.UnmarkedNorms, "tp2-sp")
    assert not verdict.passed
    assert any(line.startswith("gradients of step 1: ") and ".gate" in line for line in verdict.differences)


def test_a_loss_that_weighs_with_the_ranks_is_caught():
    verdict = prove(proof_toys.ZLossOfRanks, "dp2")
    assert any(line.startswith("z loss: step 1") for line in verdict.differences)


def test_a_loss_that_is_not_declared_as_an_extra_one_is_a_difference():
    undeclared = replace(proof_toys.ZLoss.verify[0], extra_losses=())
    verdict = verify(proof_toys.ZLoss, undeclared, declarations=["proof_toys:ZLoss"])
    assert verdict.differences == ("z loss: length: 3 numbers against 0",)


def test_a_data_source_that_begins_anew_is_caught():
    verdict = prove(proof_toys.LinesInOrder, "resume")
    assert any(line.startswith("resumed in the same layout: lm loss: ") for line in verdict.differences)


def test_a_schedule_that_begins_anew_is_caught():
    verdict = prove(proof_toys.HalvingOfCalls, "resume")
    wrong = "resumed in the same layout: learning rates of step 2"
    assert any(line.startswith(wrong) for line in verdict.differences)


def test_a_momentum_outside_of_the_checkpoint_is_caught():
    verdict = prove(proof_toys.ForgetfulSigns, "resume")
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
    empty = replace(proof_toys.GatedNorms.verify[0], compare=("feature state",), steps=1)
    verdict = verify(proof_toys.GatedNorms, empty, declarations=["proof_toys:GatedNorms"])
    assert verdict.differences == (
        "compare: feature state: is among what the proof compares, but neither side has any",
    )


def test_an_average_that_is_lost_is_caught_although_the_training_is_the_same():
    verdict = prove(proof_toys.ForgottenAverage, "resume")
    assert {line.split(": ")[1] for line in verdict.differences} == {"feature state"}
