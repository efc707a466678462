"""Needs of data: sources, micro-batches of any size, tokenizers."""

import pytest
from toy_training import PP2, losses, opened, parameters, training

from mindspeed_core.errors import ArgumentError, DataError
from mindspeed_core.feature import hookimpl
from mindspeed_testing import run_world
from mindspeed_train import loop

EVEN = ("--toy-sentences", "64")
UNEVEN = ("--toy-sentences", "40", "--toy-tokens", "48")
VARIABLE = "--variable-seq-lengths"


class Seen:
    """Notes the batches that pipeline stages get."""

    def __init__(self):
        self.batches = []

    @hookimpl(wrapper=True)
    def get_batch(self):
        batch = yield
        self.batches.append(batch)
        return batch


def save(run):
    run.session.call("save_checkpoint", run=run, reason="end")


def resumed(folder, *flags):
    """Two steps, a checkpoint, and two more steps from it."""
    with training(*flags, "--save", folder) as run:
        first = losses(run, 2)
        save(run)
    with training(*flags, "--load", folder) as run:
        return first + losses(run, 2)


def at_once(*flags):
    with training(*flags) as run:
        found = losses(run, 4)
        return found, parameters(run).tensors


def one_rank(folder):
    """Everything that is compared with other layouts."""
    return {
        "even": at_once(*EVEN),
        "uneven": at_once(*UNEVEN),
        "even resumed": resumed(f"{folder}/even", *EVEN),
        "uneven resumed": resumed(f"{folder}/uneven", *UNEVEN, "--num-workers", "2"),
        "refused": refusals(folder),
        "tokenizer": tokenizer(),
    }


def two_ranks(folder, schedules):
    seen = Seen()
    with training(*UNEVEN) as run:
        # A pipeline draws other weights.
        initial = parameters(run)
    with training(*UNEVEN, *PP2, VARIABLE, probes=[seen], initial=initial) as run:
        piped = losses(run, 4), parameters(run).tensors
    return {
        "even": at_once(*EVEN),
        "uneven": at_once(*UNEVEN),
        "even resumed": resumed(f"{folder}/even", *EVEN),
        "uneven resumed": resumed(f"{folder}/uneven", *UNEVEN, "--num-workers", "2"),
        "piped": piped,
        "batches": [
            (tuple(batch.extra), None if batch.tokens is None else tuple(batch.tokens.shape))
            for batch in seen.batches
        ],
        "interleaved": interleaved(initial),
        **{name: scheduled(name, initial) for name in SCHEDULES if name in schedules},
    }


SCHEDULES = ("1f1b", "zb-h1", "zbv")


def scheduled(name, initial):
    """The same with a schedule that sends one table of sizes per step."""
    with training(*UNEVEN, *PP2, VARIABLE, "--pipeline-schedule", name, initial=initial) as run:
        return losses(run, 4), parameters(run).tensors


def interleaved(initial):
    virtual = ("--num-layers-per-virtual-pipeline-stage", "1")
    with training(*UNEVEN, *PP2, *virtual, VARIABLE, initial=initial) as run:
        return losses(run, 4), parameters(run).tensors


def refusals(folder):
    found = {}
    for name, flags in {
        "mock": (*EVEN, "--mock-data"),
        "files": (*EVEN, "--data-path", "somewhere"),
        "full": (*UNEVEN, "--full-validation"),
        "counted": (*UNEVEN, "--micro-batch-size", "2", "--load", f"{folder}/uneven"),
    }.items():
        try:
            with training(*flags):
                pass
        except (ArgumentError, DataError) as error:
            found[name] = str(error)
    return found


def tokenizer():
    with training("--toy-letters", "30", "--vocab-size", "31") as run:
        letters = run.tokenizer
        text = letters.detokenize(letters.tokenize("abc"))
        sample = run.datasets.train[0]["tokens"]
        found = [text, run.args.padded_vocab_size, int(sample.max()), type(letters).__name__]
    try:
        with opened("--toy-letters", "200") as session:
            loop.setup(session)
    except ArgumentError as error:
        found.append(str(error))
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    (found,) = run_world(one_rank, 1, str(tmp_path_factory.mktemp("one")))
    return found


@pytest.fixture(scope="module")
def together(tmp_path_factory, asked_for):
    return run_world(two_ranks, 2, str(tmp_path_factory.mktemp("two")), asked_for("pipeline"))


def distance(one, other):
    return max(float((one[key] - other[key]).abs().max()) for key in one)


@pytest.mark.parametrize("data", ["even", "uneven"])
def test_a_data_source_trains_the_same_on_any_number_of_ranks(alone, together, data):
    expected, weights = alone[data]
    for found in together:
        assert found[data][0] == pytest.approx(expected, rel=1e-5)
        assert distance(found[data][1], weights) < 1e-5
    assert len(set(expected)) == 4


@pytest.mark.parametrize("data", ["even", "uneven"])
def test_a_resumed_run_goes_on_with_the_next_micro_batch(alone, together, data):
    assert alone[f"{data} resumed"] == alone[data][0]
    for found in together:
        assert found[f"{data} resumed"] == found[data][0]


@pytest.mark.parametrize("pipeline", ["piped", "interleaved", *SCHEDULES])
def test_micro_batches_of_different_shapes_cross_a_pipeline(alone, together, pipeline):
    expected, weights = alone["uneven"]
    for found in together:
        assert found[pipeline][0] == pytest.approx(expected, rel=1e-5)
        assert distance(found[pipeline][1], weights) < 1e-5


def test_further_fields_reach_the_pipeline_stage_that_named_them(together):
    first, last = (found["batches"] for found in together)
    assert {extra for extra, _ in first} == {()}
    assert {extra for extra, _ in last} == {("sentence_lengths",)}
    assert len({shape for _, shape in first}) > 2


def test_other_data_beside_a_source_is_refused(alone):
    refused = alone["refused"]
    assert "--mock-data" in refused["mock"]
    assert "toy-sentences brings the data" in refused["mock"]
    assert "--data-path" in refused["files"]
    assert "--eval-iters" in refused["full"]


def test_micro_batches_that_were_counted_otherwise_are_refused(alone):
    assert "--micro-batch-size 2: the batch sampler of toy-sentences" in alone["refused"]["counted"]
    assert "use --micro-batch-size 1" in alone["refused"]["counted"]


def test_a_features_tokenizer_decides_the_vocabulary(alone):
    text, padded, largest, kind, refusal = alone["tokenizer"]
    assert (text, padded, kind) == ("abc", 32, "LetterTokenizer")
    assert largest < 31
    assert "toy-letters has 201 ids, the model has 128" in refusal
