"""Generation between the steps of a training, and from its checkpoint at other layouts."""

import pytest
from generation_runs import as_megatron_lm, between_steps, generations, with_learned_positions
from tiny_models import make

from mindspeed_core.errors import UserError
from mindspeed_testing import WorldError, run_world

PROMPTS = [[5, 9, 33], [8, 100, 201, 77, 3, 60]]
OVERLAPS = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
CALLS = [("ids", (PROMPTS,), {"max_new_tokens": 12, "eos_token_id": []})]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("models") / "llama"
    # Another base of the rotary positions than megatron-core's: the checkpoint has to say so.
    make("llama", root, rope_theta=5e4)
    return str(root)


@pytest.fixture(scope="module")
def course(folder, tmp_path_factory):
    """A training of two ranks with both overlaps, which generates between its steps, and its folder."""
    save = str(tmp_path_factory.mktemp("saved"))
    return run_world(between_steps, 2, folder, OVERLAPS, save, PROMPTS)[0], save


def test_a_training_goes_on_as_if_nothing_had_been_generated(folder, course):
    found, _ = course
    plain = run_world(between_steps, 2, folder, OVERLAPS, None, [])[0]
    assert found["losses"] == plain["losses"]
    assert found["same state"]
    assert found["trains"]
    assert found["replaced"] == []
    assert found["tokens"][0] != found["tokens"][1]


@pytest.mark.parametrize(
    "options",
    [
        {"tp": 2},
        pytest.param({}, marks=pytest.mark.thorough),
        pytest.param({"pp": 2}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_a_checkpoint_of_the_training_generates_the_same_at_another_layout(course, options):
    found, save = course
    ranks = 2 if options else 1
    assert run_world(generations, ranks, save, [options], CALLS)[0] == [[found["tokens"][-1]]]


@pytest.mark.thorough
def test_a_checkpoint_of_megatron_lm_generates_at_every_layout(folder, tmp_path):
    theirs = str(tmp_path / "theirs")
    (expected,) = run_world(as_megatron_lm, 1, folder, theirs, PROMPTS)
    options = {"flags": ["--vocab-size", "250"]}
    (alone,) = run_world(generations, 1, theirs, [options], CALLS)
    assert alone == [[expected]]
    layouts = [{**options, "tp": 2}, {**options, "pp": 2}]
    assert run_world(generations, 2, theirs, layouts, CALLS)[0] == [[expected], [expected]]


def test_learned_positions_count_from_the_beginning_of_each_text():
    ((together, alone, plain),) = run_world(with_learned_positions, 1, [[5, 9, 33], [8, 100, 77, 3, 60, 2]])
    assert together == alone == plain


@pytest.mark.thorough
def test_one_rank_and_two_of_a_training_generate_alike(folder):
    # Two ranks drop out other values than one.
    plain = ["--attention-dropout", "0", "--hidden-dropout", "0"]
    alone = run_world(between_steps, 1, folder, plain, None, PROMPTS)[0]
    together = run_world(between_steps, 2, folder, [*OVERLAPS, *plain], None, PROMPTS)[0]
    assert alone["losses"] == pytest.approx(together["losses"], rel=1e-4)
    assert alone["tokens"] == together["tokens"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tensor-model-parallel-size", "2", "--sequence-parallel"], "has one token, which ranks cannot"),
        (
            ["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"],
            "2 chunks of the model.*load the checkpoint without virtual stages",
        ),
        (
            ["--tensor-model-parallel-size", "2", "--tp-2d", "--tp-x", "2"],
            "--tp-2d: a step of decoding has one token",
        ),
        (["--reset-attention-mask"], "leave --reset-attention-mask and --fix-sub-seq-length out where text"),
    ],
)
def test_a_training_that_cannot_generate_says_why(folder, flags, words):
    with pytest.raises((WorldError, UserError), match=words):
        run_world(between_steps, 2, folder, flags, None, PROMPTS)
