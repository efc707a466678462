"""The record of a run of all proofs on the lagging device: what passed on which commit, what failed."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import lagging_proofs
from proof_journal import Journal


def outcome(proof, commit, passed=True):
    return {"proof": proof, "commit": commit, "passed": passed, "text": ""}


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "build" / "journal.jsonl")


def test_only_what_passed_last_on_a_commit_is_not_run_again(journal):
    for one in (
        outcome("a", "1111"),
        outcome("b", "1111", passed=False),
        outcome("c", "2222"),
        outcome("d", "1111"),
        outcome("d", "1111", passed=False),
        outcome("e", "a changed tree"),
    ):
        journal.note(one)

    assert set(journal.passed_on(["1111"])) == {"a"}
    assert set(journal.passed_on(["1111", "22"])) == {"a", "c"}


def test_the_record_counts_by_commit_and_names_what_failed():
    found = [outcome("a", "1111"), outcome("b", "2222", passed=False), outcome("c", "2222")]

    record = lagging_proofs.record(found)

    assert record["proofs"] == 3
    assert record["passed"] == {"1111": 1, "2222": 1}
    assert record["failed"] == ["b"]


def test_a_proof_is_named_by_what_stands_in_brackets():
    assert lagging_proofs.proof_of("tests/test_a.py::test_b[swap-tp2 [x]]") == "swap-tp2 [x]"
