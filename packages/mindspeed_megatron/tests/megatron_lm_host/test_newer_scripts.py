"""Scripts that read their arguments before they call ``pretrain``: trainings are those of older ones."""

import os
import re
from pathlib import Path

import fake_newer
import fake_training as fake
import pytest

from mindspeed_testing.worlds import run_world
from mindspeed_train import loop as _standalone  # noqa: F401 - preloads what worlds need

LOCAL = ("--platform", "cpu")
SCALED = (*LOCAL, "--scaled-tokens", "3", "--scaled-dropout", "0.1")
DOCUMENTS = (
    *(
        "--platform",
        "cpu",
        "--global-batch-size",
        "4",
        "--seq-length",
        "32",
        "--max-position-embeddings",
        "32",
    ),
    *("--untie-embeddings-and-output-weights", "--context-parallel-size", "2", "--reset-position-ids"),
    *("--reset-attention-mask", "--train-iters", "2"),
)


def losses(done):
    return done["status"], [line["lm loss"] for line in done["log"] if "lm loss" in line]


def run(script, *flags):
    done = fake.run_script(*flags, script=script)
    fake.forget_run()
    return done


def scripts(folder):
    provided = Path(folder) / f"provided-{os.getpid()}.py"
    return {
        "built": fake_newer.SCRIPT,
        "provided": fake.changed_script(provided, fake_newer.PROVIDED, fake_newer.SCRIPT),
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run_world(f"{__name__}:train_alone", 1, str(tmp_path_factory.mktemp("alone")), timeout=150)[0]


def train_alone(folder):
    from mindspeed_testing.leak_check import ProcessState

    features = (fake.Scaled, fake.Failing, fake.Rotary, fake.Average)
    adaptor = fake.adapt(*features)
    found = {"older": run(fake.SCRIPT, *LOCAL), "older scaled": run(fake.SCRIPT, *SCALED)}
    adaptor.uninstall()
    fake_newer.use()
    fake.adapt(*features)
    entered = ProcessState.now()
    for name, script in scripts(folder).items():
        found[name] = run(script, *LOCAL)
        fake.configurations.clear()
        found[f"{name} scaled"] = run(script, *SCALED)
        found[f"{name} configurations"] = len(fake.configurations)
    found["left"] = ProcessState.now().left_since(entered)
    found["unknown"] = run(fake_newer.SCRIPT, *LOCAL, "--no-such-flag")
    found["conflict"] = run(fake_newer.SCRIPT, *LOCAL, "--position-embedding-type", "spiral")
    found["plan"] = run(fake_newer.SCRIPT, *LOCAL, "--scaled-tokens", "1", "--plan-only")
    found["left by refusals"] = ProcessState.now().left_since(entered)
    try:
        run(fake_newer.SCRIPT, *LOCAL, "--failing")
    except ValueError as error:
        found["failure"] = str(error)
    fake.forget_run()
    found["left by failure"] = ProcessState.now().left_since(entered)
    failing = fake.changed_script(
        Path(folder) / "failing.py", [("    pretrain(\n", "    1 / 0\n    pretrain(\n")], fake_newer.SCRIPT
    )
    try:
        run(failing, *LOCAL, "--scaled-tokens", "1")
    except ZeroDivisionError:
        fake.forget_run()
    found["after a failure"] = run(fake_newer.SCRIPT, *LOCAL)
    again = fake.changed_script(
        Path(folder) / "again.py",
        [("    pretrain(\n", "    for _ in range(2):\n     pretrain(\n")],
        fake_newer.SCRIPT,
    )
    found["again"] = run(again, *LOCAL)
    found["left at last"] = ProcessState.now().left_since(entered)
    return found


@pytest.mark.parametrize("name", ["built", "provided"])
def test_losses_are_those_of_the_older_order(alone, name):
    assert losses(alone[name]) == losses(alone["older"])
    assert len(losses(alone[name])[1]) == 3


@pytest.mark.parametrize("name", ["built", "provided"])
def test_features_change_configuration_and_batch_as_there(alone, name):
    assert losses(alone[f"{name} scaled"]) == losses(alone["older scaled"])
    assert alone[f"{name} configurations"] == 1


def test_no_more_functions_are_intercepted(alone):
    counts = [
        int(re.search(r"(\d+) functions of Megatron-LM are intercepted", alone[name]["out"]).group(1))
        for name in ("older", "built", "provided")
    ]
    assert counts == [counts[0]] * 3


@pytest.mark.parametrize("when", ["left", "left by refusals", "left by failure", "left at last"])
def test_nothing_stays_changed(alone, when):
    assert alone[when] == []


def test_unknown_flags_and_plans_that_fail_end_the_program_with_a_message(alone):
    assert (alone["unknown"]["status"], alone["conflict"]["status"]) == (2, 1)
    assert "--no-such-flag" in alone["unknown"]["err"]
    assert "spirals need RMSNorm" in alone["conflict"]["err"]
    assert (alone["plan"]["status"], alone["plan"]["log"]) == (0, [])
    assert "scaled" in alone["plan"]["out"]


def test_a_failing_step_and_a_failing_script_stop_no_later_training(alone):
    assert alone["failure"] == "this step fails"
    assert losses(alone["after a failure"]) == losses(alone["older"])


def test_pretrain_without_arguments_of_its_own_is_refused(alone):
    assert alone["again"]["status"] == 1
    assert "call parse_and_validate_args before each call of pretrain" in alone["again"]["err"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return run_world(f"{__name__}:train_in_pairs", 2, str(tmp_path_factory.mktemp("pairs")), timeout=150)


def train_in_pairs(folder):
    from mindspeed_cp.features import DECLARATIONS

    features = (fake.Average, fake.Twice, fake.WholeBatch, *DECLARATIONS)
    adaptor = fake.adapt(*features)
    older = losses(run(fake.SCRIPT, *DOCUMENTS))
    adaptor.uninstall()
    fake_newer.use()
    fake.adapt(*features)
    built = fake_newer.SCRIPT
    flags = (*LOCAL, "--use-distributed-optimizer", "--average", "--twice", "--train-iters", "4")
    place = ("--save", folder, "--save-interval", "2", "--exit-interval", "2")
    found = {"whole": run(built, *flags)["log"], "part": run(built, *flags, *place)["log"], "older": older}
    found["rest"] = run(built, *flags, "--load", folder)["log"]
    for name, script in scripts(folder).items():
        found[name] = losses(run(script, *DOCUMENTS))
    shape = (*LOCAL, "--untie-embeddings-and-output-weights", "--reset-position-ids", "--train-iters", "1")
    shape = (*shape, "--whole-batch", "--global-batch-size", "2")
    for name, flag in (("pp2", "--pipeline-model-parallel-size"), ("tp2", "--tensor-model-parallel-size")):
        fake.batches_seen.clear()
        assert run(built, *shape, flag, "2")["status"] == 0
        found[name] = fake.batches_seen[0]
    return found


def test_a_resumed_run_goes_on_exactly_with_the_state_of_features(pairs):
    whole, rest = (
        [line["lm loss"] for line in pairs[0][name] if "lm loss" in line] for name in ("whole", "rest")
    )
    assert rest == whole[2:]
    assert pairs[0]["rest"][0]["steps counted"] == 3


def test_a_feature_gets_what_it_needs_of_a_batch_on_every_rank(pairs):
    assert [sorted(rank["pp2"][0]) for rank in pairs] == [
        ["position_ids", "tokens"],
        ["labels", "loss_mask", "position_ids"],
    ]
    first, last = ([batch["position_ids"] for batch in rank["pp2"]] for rank in pairs)
    assert first == last
    assert pairs[0]["tp2"] == pairs[1]["tp2"]


@pytest.mark.parametrize("name", ["built", "provided"])
def test_a_description_of_split_documents_reaches_the_model(pairs, name):
    assert pairs[0][name] == pairs[0]["older"]
    assert len(pairs[0][name][1]) == 2
