"""One message for one failure: which rank speaks."""

import pytest
import torch.distributed as dist

from mindspeed_core.errors import UserError
from mindspeed_megatron.launch import failure


def silent_about(monkeypatch, store):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(failure, "_shared_store", lambda: store)


def test_the_first_rank_speaks_and_the_second_is_silent(monkeypatch, capsys):
    silent_about(monkeypatch, dist.HashStore())
    assert failure.report(UserError("the disk is full")) == 1
    assert "the disk is full" in capsys.readouterr().err
    assert failure.report(UserError("the disk is full")) == 1
    assert capsys.readouterr().err == ""


def test_a_closed_connection_gives_way_to_the_rank_that_closed_it(monkeypatch, capsys):
    store = dist.HashStore()
    silent_about(monkeypatch, store)
    failure.report(ValueError("the cause"))
    capsys.readouterr()
    failure.report(RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1"))
    assert capsys.readouterr().err == ""


def test_without_a_store_every_rank_speaks(monkeypatch, capsys):
    silent_about(monkeypatch, None)
    failure.report(UserError("first"))
    failure.report(UserError("second"))
    assert "second" in capsys.readouterr().err


def test_the_message_names_the_rank(monkeypatch, capsys):
    silent_about(monkeypatch, dist.HashStore())
    monkeypatch.setenv("RANK", "1")
    failure.report(UserError("wrong"))
    assert "rank 1 of 2" in capsys.readouterr().err


def test_a_variable_asks_for_tracebacks_where_no_command_line_can(monkeypatch, capsys):
    monkeypatch.setenv("MINDSPEED_TRACEBACK", "1")
    with pytest.raises(UserError) as raised:
        raise UserError("the disk is full")
    assert failure.report(raised.value) == 1
    assert capsys.readouterr().err.startswith("Traceback")
