"""Ranks that never come, or that were started for another world, are named by those that wait for them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FLAG = "--distributed-timeout-minutes"


@pytest.fixture(scope="module")
def worlds():
    # torch reads the level, which the programs set, when it is imported.
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "meeting_worlds.py")],
        env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    return json.loads(ran.stdout)


def answers(worlds, name):
    """Return what came of each process; nobody printed anything, and each message is a sentence."""
    assert worlds[name]["printed"] == ""
    for answer in worlds[name]["answers"]:
        assert "\n" not in answer
        assert "c10d" not in answer
        assert "Store" not in answer
    return worlds[name]["answers"]


def test_ranks_meet_again_and_again_in_one_process(worlds):
    assert answers(worlds, "all come") == [["met", 0, 1, 2]] * 3


def test_a_rank_that_never_comes_is_named_with_those_that_came(worlds):
    first, second = answers(worlds, "one missing")
    assert first == second
    assert f"rank 2 of 3 did not come within 1 min ({FLAG})" in first
    assert "while ranks 0-1 (host " in first
    assert FLAG in first
    assert "MASTER_ADDR 127.0.0.1, MASTER_PORT " in first


def test_without_rank_0_the_address_and_the_timeout_are_named(worlds):
    (alone,) = answers(worlds, "no rank 0")
    assert "rank 1 of 2" in alone
    assert "found nobody at MASTER_ADDR 127.0.0.1, MASTER_PORT " in alone
    assert f"within 2 s ({FLAG}): Connection refused" in alone


def test_a_store_that_ends_as_it_is_found_is_nobody(worlds):
    (alone,) = answers(worlds, "ended as it was found")
    assert "found nobody at MASTER_ADDR 127.0.0.1, MASTER_PORT " in alone
    assert f"within 2 s ({FLAG})" in alone


def test_a_rank_with_another_port_is_missed_and_finds_nobody(worlds):
    zero, one = answers(worlds, "other port")
    assert "rank 1 of 2 did not come" in zero
    assert "found nobody at" in one


def test_a_name_that_does_not_resolve_is_named(worlds):
    (lost,) = answers(worlds, "no such host")
    assert "MASTER_ADDR 'nowhere.invalid' did not resolve within 2 s" in lost


def test_ranks_of_another_world_size_are_named_at_once(worlds):
    zero, one, _ = answers(worlds, "other world size")
    assert zero == one
    assert "was started for WORLD_SIZE 3, rank 0 (host " in zero
    assert "--nproc-per-node" in zero


def test_two_processes_of_one_rank_are_named_at_once(worlds):
    same = answers(worlds, "same rank")
    assert len(set(same)) == 1
    assert "as rank 1 of 3: host " in same[0]
    assert "--node-rank" in same[0]


def test_two_processes_of_rank_0_are_named_at_once(worlds):
    for answer in answers(worlds, "two ranks 0"):
        assert "two processes came" in answer
        assert "as rank 0 of 2" in answer


def test_the_end_of_rank_0_is_a_consequence(worlds):
    _, other = answers(worlds, "rank 0 dies")
    assert other.startswith("LostPeerError: rank 1 of 3")
    assert "look at the first error in their output" in other


def test_another_program_at_the_port_is_no_endless_wait(worlds):
    (found,) = answers(worlds, "no store")
    assert "is not the store of this job" in found
    assert "set another MASTER_PORT" in found


def test_a_port_that_is_taken_is_named(worlds):
    (zero,) = answers(worlds, "port taken")
    assert "cannot serve MASTER_PORT" in zero
    assert "Address already in use" in zero


def test_a_process_too_many_is_sent_away_and_the_others_go_on(worlds):
    zero, one, late = answers(worlds, "late")
    assert (zero, one) == (["met", 0, 2], ["met", 1, 2])
    assert "the 2 ranks that meet at" in late
    assert "complete without this process, rank 1 of 2" in late


def test_a_process_of_another_job_is_sent_away_and_the_job_goes_on(worlds):
    zero, foreign, one = answers(worlds, "another job")
    assert (zero, one) == (["met", 0, 2], ["met", 1, 2])
    assert "where another job meets, of 2 ranks" in foreign


def test_ranks_of_former_attempts_in_a_launchers_store_are_not_waited_for(worlds):
    stale, *met = answers(worlds, "agents' store")
    assert "rank 0 of 3 did not come" in stale
    assert met == [["met", 0, 2], ["met", 1, 2], ["met", 0, 1]]
