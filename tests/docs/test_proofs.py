"""Recorded results of proofs are shown for exactly the proofs that were run."""

from __future__ import annotations

import json
from dataclasses import replace

import proofs
import pytest
from feature_pages import feature_page, tabled_flags
from generate import tree_registry
from proofs_of_features import proof_page

from mindspeed_core.feature import Feature, Flag, Resume, Scenario

RUN = Scenario("plain", ("--swift",), steps=2, tolerance=1e-5)


class Swift(Feature):
    name = "swift"
    family = "kernels"
    summary = "Does the same, sooner."
    flags = (Flag("--swift", help="Do it sooner."),)
    verify = (RUN,)


@pytest.fixture
def record(tmp_path, monkeypatch):
    """The result of one proof, recorded as `proofs.record` writes it."""
    gain = {"measure": "peak_bytes", "ratio": 0.5, "at_most": 0.9}
    result = {"proof": proofs.identity(RUN), "largest_error": 2e-7, "compared": 9, "gains": [gain]}
    where = {"platform": "cpu", "torch": "2.13.0", "megatron-core": "0.16.1", "python": "3.11"}
    (tmp_path / "swift.json").write_text(json.dumps({"where": where, "proofs": {"plain": result}}))
    monkeypatch.setattr(proofs, "RECORDS", tmp_path)


@pytest.mark.usefixtures("record")
def test_a_recorded_result_stands_on_the_page_of_proofs():
    page = proof_page("acme", Swift)

    assert "| `plain` | 1 | 2 | 1e-05 | 2.0e-07 | peak_bytes × 0.5 (at most 0.9) |" in page
    assert "Results of platform `cpu` with torch 2.13.0, megatron-core 0.16.1, python 3.11." in page


@pytest.mark.usefixtures("record")
def test_the_page_of_the_feature_says_in_one_line_what_its_proofs_gave():
    page = feature_page("acme", Swift)
    (line,) = [line for line in page.splitlines() if "proof" in line]

    assert line == (
        "1 proof, largest error 2.0e-07, run on platform `cpu` with torch 2.13.0, megatron-core 0.16.1, "
        "python 3.11: [the proofs](../../proofs/acme/swift.md)."
    )


def test_a_flag_stands_once_on_the_page_of_its_feature():
    shown = tabled_flags("| flag | meaning |\n|---|---|\n| `--swift`, `--fast` | do it |\n\n| x |\n")

    assert shown == {"--swift", "--fast"}
    assert "| `--swift` | switch |" in feature_page("acme", Swift)


@pytest.mark.usefixtures("record")
@pytest.mark.parametrize(
    "change",
    [
        {"tolerance": 1e-7},
        {"flags": ("--swift", "--bf16")},
        {"steps": 3},
        {"world_size": 2},
        {"compare": ("losses",)},
        {"extra_losses": ("z loss",)},
        {"resume": Resume(("--swift",), world_size=2)},
    ],
)
def test_a_result_of_another_proof_is_not_shown(monkeypatch, change):
    monkeypatch.setattr(Swift, "verify", (replace(RUN, **change),))

    assert "not recorded" in proof_page("acme", Swift)


@pytest.mark.usefixtures("record")
def test_a_proof_across_a_checkpoint_shows_both_layouts(monkeypatch):
    resume = Resume(("--swift", "--bf16"), world_size=2)
    monkeypatch.setattr(Swift, "verify", (replace(RUN, name="resume", resume=resume),))
    page = proof_page("acme", Swift)

    assert "| `resume` | 1, resumed on 2 | 2 + 2 | 1e-05 | not recorded |" in page
    assert "| resumed in the other layout | `--bf16` |" in page


def test_a_failed_proof_is_told_and_not_recorded(tmp_path, monkeypatch):
    verdict = {
        "scenario": "plain",
        "passed": False,
        "error": "",
        "differences": ["loss: 2 against 1"],
    }
    monkeypatch.setattr(proofs, "RECORDS", tmp_path)
    monkeypatch.setattr(proofs, "verdicts", lambda name: {"platform": "cpu", "verdicts": [verdict]})

    assert proofs.record(Swift) == ["swift / plain: loss: 2 against 1"]
    assert list(tmp_path.iterdir()) == []


def test_every_record_belongs_to_a_feature():
    features = tree_registry().features

    assert {path.stem for path in proofs.RECORDS.glob("*.json")} - set(features) == set()


def test_every_proof_that_a_cpu_can_run_is_recorded():
    missing = [
        f"{name} / {scenario.name}"
        for name, found in tree_registry().features.items()
        for scenario in found.cls.verify
        if "cpu" in (scenario.platforms or found.cls.platforms)
        and scenario.name not in proofs.recorded(found.cls)[1]
    ]
    assert not missing, "python docs/proofs.py records what a feature's proofs gave"
