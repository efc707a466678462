"""A rank that follows ends with the ranks it needs, and goes on after what it was merely asked wrongly."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import make

from mindspeed_core.errors import LostPeerError, UserError
from mindspeed_models.inference.loaded import LoadedModel


class Commands:
    """A leader that has said nothing more than these commands."""

    alone = False

    def __init__(self, said):
        self.said = said

    def share(self, command):
        return {"do": self.said.pop(0)}

    def close(self):
        """Nothing was opened."""


class Engine:
    """Computes nothing, and fails as it is told."""

    midway = False

    def __init__(self, failures):
        self.failures = failures

    def score(self, pairs):
        raise self.failures.pop(0)


class Follower(LoadedModel):
    """A rank that follows, without a model."""

    def __init__(self, said, failures):
        from contextlib import ExitStack

        self.leader, self._closing = False, ExitStack()
        self._commands, self._engine = Commands(said), Engine(failures)

    def _scored(self, command):
        return self._own_engine().score([])


def test_a_refusal_is_the_leaders_to_tell():
    follower = Follower(["score", "score", "close"], [UserError("too long"), UserError("too long")])
    follower.follow()
    assert follower._commands.said == []


def test_a_lost_rank_ends_a_follower_without_waiting_for_another_command():
    said = ["score", "close"]
    with (
        pytest.raises(LostPeerError, match="rank 2 ended"),
        Follower(said, [LostPeerError("rank 2 ended")]) as model,
    ):
        model.follow()
    assert said == ["close"]


@pytest.mark.thorough
@pytest.mark.parametrize("moment", ["idle", "midway"])
def test_a_follower_ends_when_its_leader_dies(moment, tmp_path):
    make("llama", tmp_path / "llama", vocab_size=400)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    shared |= {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}
    line = [sys.executable, str(Path(__file__).with_name("lost_leader.py")), str(tmp_path / "llama"), moment]
    ranks = [
        subprocess.Popen(
            line,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        (_, _), (output, errors) = (rank.communicate(timeout=240) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [9, 1], errors
    assert output.splitlines() == ["follows"]
