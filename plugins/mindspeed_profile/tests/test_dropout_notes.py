"""The plan says that dropout changes, with a torch that compiles nothing that is counted."""

from argparse import Namespace

import pytest

from mindspeed_profile.features import throughput

DROPPED = {"hidden_dropout": 0.1, "bias_dropout_fusion": True, "flops_mode": "both"}


def notes(monkeypatch, eagerly, **changes):
    monkeypatch.setattr(throughput, "run_eagerly_when_observed", lambda: eagerly)
    return throughput.CountedThroughput.notes(Namespace(**DROPPED | changes))


def test_an_older_torch_is_noted(monkeypatch):
    (note,) = notes(monkeypatch, eagerly=True)
    assert note.startswith("--op-cal-tflops:")
    assert "--no-bias-dropout-fusion" in note


def test_a_torch_that_compiles_all_the_same_needs_no_note(monkeypatch):
    assert not notes(monkeypatch, eagerly=False)


@pytest.mark.parametrize(
    "changes", [{"hidden_dropout": 0.0}, {"bias_dropout_fusion": False}, {"flops_mode": "model"}]
)
def test_without_compiled_dropout_or_a_counted_step_there_is_no_note(monkeypatch, changes):
    assert not notes(monkeypatch, eagerly=True, **changes)
