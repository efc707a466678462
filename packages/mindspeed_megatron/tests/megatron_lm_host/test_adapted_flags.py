"""The flags of features on Megatron-LM's command line: read, adopted, resolved and refused."""

from pathlib import Path

import fake_training as fake
import pytest

from mindspeed_testing.worlds import run_world

LOCAL = ("--platform", "cpu")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("scripts"))
    return run_world(f"{__name__}:run_all", 1, folder, timeout=120)[0]


NO_NAMES = (
    ("    is_first_or_last_pipeline_stage,\n", "    is_first_or_last_pipeline_stage as has_data,\n"),
    ("is_first_or_last_pipeline_stage(", "has_data("),
)
NO_BATCH = (("get_batch(", "micro_batch("),)
FIVE_VALUES = (
    ("position_ids, packed =", "position_ids ="),
    (", packed_seq_params=packed", ""),
    ("(*batch.values(), None)", "tuple(batch.values())"),
)


def run_all(folder):
    fake.adapt(fake.Rotary, fake.OwnProfile, fake.Scaled, fake.WholeBatch, fake.Described, fake.Weighted)
    spiral = ("--position-embedding-type", "spiral", "--log-interval", "1")
    found = {}
    for name, flags in {
        "conflict": spiral,
        "unknown": ("--scaled-token", "3"),
        "value": ("--scaled-tokens", "many"),
        "both": ("--scaled-tokens", "many", "--nothing-of-this-name"),
        "plan": (*spiral, "--normalization", "RMSNorm", "--plan-only"),
        "help": ("--help",),
        "no such field": ("--weighted",),
        "worker": ("--use-persistent-ckpt-worker",),
    }.items():
        found[name] = fake.run_script(*LOCAL, *flags)
    for name, (flags, changes) in {
        "no names": (("--whole-batch", "--pipeline-model-parallel-size", "2"), NO_NAMES),
        "no batch": (("--scaled-tokens", "1"), NO_BATCH),
        "five values": (("--described",), FIVE_VALUES),
    }.items():
        script = fake.changed_script(Path(folder) / f"{name}.py", changes)
        found[name] = fake.run_script(*LOCAL, *flags, script=script)
    fake.forget_run()
    found["spiral"] = fake.run_script(*LOCAL, *spiral, "--normalization", "RMSNorm", "--scaled-tokens", "1")
    from megatron.training import get_args

    found["hidden size"] = get_args().hidden_size
    fake.forget_run()
    found["profile"] = fake.run_script(*LOCAL, "--profile")
    return found


def test_a_requirement_that_does_not_hold_ends_the_program_with_one_message(runs):
    assert runs["conflict"]["status"] == 1
    assert runs["conflict"]["err"].count("spirals need RMSNorm") == 1


def test_an_unknown_flag_gets_a_suggestion(runs):
    assert runs["unknown"]["status"] == 2
    assert "did you mean --scaled-tokens" in runs["unknown"]["err"]


def test_a_wrong_value_names_the_flag(runs):
    assert runs["value"]["status"] == 2
    assert "--scaled-tokens" in runs["value"]["err"]


def test_all_problems_come_at_once(runs):
    assert "2 problems" in runs["both"]["err"]


def test_a_plan_is_printed_without_training(runs):
    assert runs["plan"]["status"] == 0
    assert "rotary" in runs["plan"]["out"]
    assert runs["plan"]["log"] == []


def test_help_shows_the_flags_of_features_and_what_they_add(runs):
    assert "--scaled-tokens" in runs["help"]["out"]
    assert "spiral: rotary" in runs["help"]["out"]


def test_a_choice_that_a_feature_adds_is_accepted_and_its_preset_holds(runs):
    assert runs["spiral"]["status"] == 0
    assert runs["hidden size"] == 64


def test_a_flag_that_a_feature_takes_over_is_kept_from_the_loop(runs):
    assert runs["profile"]["status"] == 0
    assert runs["profile"]["log"][0]["profiled"] == 1.0


def test_a_process_that_would_have_no_session_is_refused(runs):
    assert runs["worker"]["status"] == 1
    assert "leave it out with --platform cpu" in runs["worker"]["err"]


def test_a_script_that_cannot_be_asked_for_more_of_a_batch_is_refused(runs):
    assert runs["no names"]["status"] == 1
    assert "whole-batch" in runs["no names"]["err"]
    assert "the script has no is_first_or_last_pipeline_stage to ask" in runs["no names"]["err"]


def test_a_part_of_a_batch_that_no_script_has_is_refused(runs):
    assert runs["no such field"]["status"] == 1
    assert "batches of Megatron-LM's scripts have no weights" in runs["no such field"]["err"]


def test_a_script_without_a_batch_of_its_own_is_refused(runs):
    assert runs["no batch"]["status"] == 1
    assert "scaled" in runs["no batch"]["err"]
    assert "calls no get_batch of its own" in runs["no batch"]["err"]


def test_a_script_that_passes_no_description_on_is_refused(runs):
    assert runs["five values"]["status"] == 1
    assert "passes no packed_seq_params" in runs["five values"]["err"]
