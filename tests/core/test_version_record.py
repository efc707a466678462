"""The record of proofs on other megatron-cores: which run, in which order, and what stands of each pair."""

import json
import sys
from pathlib import Path

import pytest

from mindspeed_core.registry import Registry

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import version_proofs


@pytest.fixture(scope="module")
def proofs():
    return version_proofs.stable_proofs(Registry.discover())


def outcome(proof, commit="1111", passed=True):
    return {"proof": proof.name, "commit": commit, "passed": passed, "text": ""}


def test_proofs_of_our_stable_features_run_the_first_of_each_before_all_others(proofs):
    assert {proof.feature.stability for proof in proofs} == {"stable"}
    assert all(proof.feature.__module__.startswith("mindspeed_") for proof in proofs)
    features = {proof.feature for proof in proofs}
    assert {proof.feature for proof in proofs[: len(features)]} == features


def test_a_name_chooses_proofs(proofs):
    chosen = version_proofs.stable_proofs(Registry.discover(), ["flash-attn"])

    assert chosen
    assert all(proof.name.startswith("flash-attn") for proof in chosen)


def test_the_record_says_what_is_missing_and_keeps_other_pairs(proofs, tmp_path):
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"3.9 x 0.1": {"proofs": 1}}))
    first, second, *_ = proofs
    found = {first.name: outcome(first), second.name: outcome(second, passed=False)}

    left = version_proofs.write_record(path, proofs, found)

    written = json.loads(path.read_text())
    assert written["3.9 x 0.1"] == {"proofs": 1}
    pair = written[version_proofs.PAIR]
    assert pair["passed"] == {"1111": 1}
    assert pair["failed"] == [second.name]
    assert pair["without an outcome"] == len(proofs) - 2
    assert left == len(proofs) - 1


def test_a_proof_that_cannot_begin_is_an_outcome(proofs, monkeypatch):
    def fail(*given, **options):
        raise ImportError("no such module")

    monkeypatch.setattr(version_proofs, "verify", fail)

    found = version_proofs.proved(proofs[0], "1111")

    assert not found["passed"]
    assert found["text"] == "ImportError: no such module"
