"""The plan says that dropout changes, with a torch that compiles nothing that is followed."""

from argparse import Namespace

from mindspeed_memory.features import memory_report

DROPPED = {"hidden_dropout": 0.1, "bias_dropout_fusion": True}


def notes(monkeypatch, eagerly, **changes):
    monkeypatch.setattr(memory_report, "run_eagerly_when_observed", lambda: eagerly)
    return memory_report.MemoryReport.notes(Namespace(**DROPPED | changes))


def test_an_older_torch_is_noted(monkeypatch):
    (note,) = notes(monkeypatch, eagerly=True)
    assert note.startswith("--memory-report:")
    assert "--no-bias-dropout-fusion" in note


def test_a_torch_that_compiles_all_the_same_needs_no_note(monkeypatch):
    assert not notes(monkeypatch, eagerly=False)


def test_dropout_that_is_not_fused_needs_no_note(monkeypatch):
    assert not notes(monkeypatch, eagerly=True, bias_dropout_fusion=False)
