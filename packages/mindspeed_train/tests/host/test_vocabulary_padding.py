"""The padding of a vocabulary is that of the checkpoint: losses do not depend on the layout that loads it."""

from __future__ import annotations

import pytest
import torch
from test_checkpoint_resume import NO_DROPOUT, close_run, open_run, save, train

from mindspeed_core.errors import CheckpointError, SessionError
from mindspeed_megatron.vocabulary import KEPT, Vocabulary, settle_vocabulary
from mindspeed_testing.worlds import run_world

ODD = ["--vocab-size", "51", "--make-vocab-size-divisible-by", "1", *NO_DROPOUT]
TWO = ["--tensor-model-parallel-size", "2"]
KINDS = {
    "tied": [],
    "untied, predictions": ["--untie-embeddings-and-output-weights", "--mtp-num-layers", "1"],
    "fused, sharded": ["--cross-entropy-loss-fusion", "--use-distributed-optimizer"],
    "chunked": ["--lm-loss-chunks", "2"],
}


def losses(run, steps=2):
    return [(float.fromhex(loss), float.fromhex(norm)) for loss, norm, _ in train(run, steps)]


def first(folder, layout, kinds):
    """Train, save and train on: padded rows and losses."""
    found = {}
    for kind in kinds:
        flags = KINDS[kind]
        run = open_run(["--save", f"{folder}/{kind}", *ODD, *flags, *layout])
        train(run, 2)
        save(run)
        found[kind] = run.args.padded_vocab_size, losses(run)
        close_run(run)
    return found


def resumed(folder, layout, kinds, save_to=""):
    found = {}
    for kind in kinds:
        flags = KINDS[kind]
        run = open_run(["--load", f"{folder}/{kind}", *ODD, *flags, *layout])
        if save_to:
            run.args.save = f"{save_to}/{kind}"
            save(run)
        found[kind] = run.args.padded_vocab_size, losses(run)
        close_run(run)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory, asked_for):
    kinds = [kind for kind in KINDS if kind in asked_for("kind")]
    folder = tmp_path_factory.mktemp("vocabulary")
    one, two, again = (str(folder / name) for name in ("one", "two", "again"))
    return {
        "one": run_world(first, 1, one, [], kinds)[0],
        "one to two": run_world(resumed, 2, one, TWO, kinds, again)[0],
        "one to two to one": run_world(resumed, 1, again, [], kinds)[0],
        "two": run_world(first, 2, two, TWO, kinds)[0],
        "two to one": run_world(resumed, 1, two, [], kinds)[0],
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("way", "rows"), [("one to two", 52), ("one to two to one", 51), ("two to one", 52)])
def test_a_resumed_run_has_the_losses_of_the_run_that_saved(found, way, rows, kind):
    padded, resumed_losses = found[way][kind]
    _, expected = found[way[:3]][kind]
    assert padded == rows
    assert resumed_losses == [pytest.approx(step, rel=2e-5) for step in expected]


class Layer(torch.nn.Module):
    """An output layer of one rank."""

    def __init__(self, columns, output_size=8):
        super().__init__()
        self.columns, self.output_size, self.output_size_per_partition = columns, output_size, 4
        self.tp_group = type("Group", (), {"size": lambda _: 2, "rank": lambda _: 1})()

    def forward(self, hidden):
        return hidden.new_zeros(2, self.columns) + hidden.sum(), None


class Model(torch.nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.output_layer = Layer(columns)


class State:
    """A session, as far as the vocabulary asks."""

    def __init__(self):
        self.vocabulary = Vocabulary()

    def state(self, kind):
        return self.vocabulary


@pytest.mark.parametrize(("columns", "hidden"), [(4, 1), (8, 3)])
def test_columns_of_padding_are_left_out_of_a_part_and_of_the_whole(columns, hidden):
    session, model = State(), Model(columns)
    settle_vocabulary(session, [model], saved=7 if columns == 4 else 5, rows=8, ids=None, where="there")
    logits, _ = model.output_layer(torch.ones(1, requires_grad=True))
    least = torch.finfo(torch.float32).min
    assert (logits == least).sum(dim=-1).tolist() == [hidden, hidden]


def test_an_output_layer_of_another_shape_is_refused():
    session, model = State(), Model(3)
    settle_vocabulary(session, [model], saved=7, rows=8, ids=None, where="there")
    with pytest.raises(SessionError, match="3 columns for a vocabulary of 8"):
        model.output_layer(torch.ones(1))


def test_a_smaller_padding_narrows_the_softmax_further_and_never_widens_it():
    session, model = State(), Model(8)
    settle_vocabulary(session, [model], saved=7, rows=8, ids=None, where="there")
    settle_vocabulary(session, [model], saved=6, rows=8, ids=None, where="there")
    assert settle_vocabulary(session, [model], saved=8, rows=8, ids=None, where="there") == []
    assert (getattr(model.output_layer, KEPT), session.vocabulary.kept) == (6, 6)
    assert len(model.output_layer._forward_hooks) == 1


def test_rows_that_are_left_out_are_said():
    said = settle_vocabulary(State(), [Model(8)], saved=12, rows=8, ids=None, where="there")
    assert said[0].startswith("there: the last 4 of the 12 rows")


def test_a_larger_vocabulary_is_refused_with_both_values():
    with pytest.raises(CheckpointError, match=r"50 with its padding \(checkpoint\) / 51 \(this run\)"):
        settle_vocabulary(State(), [], saved=50, rows=52, ids=51, where="there")
