"""Outcomes of long checks are kept by command line, with every script that has it."""

from types import SimpleNamespace

import plans
import pytest
import verdicts
from checked_lines import Script
from verdicts import BAD, LACKS, OK, Record, summary

NAMES = {"1": ["one:a", "other:b"], "2": ["one:c"]}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(verdicts, "FOLDER", tmp_path)
    return tmp_path


def keep(key, scripts, verdict=OK):
    Record.read("kept.json").add(key, script=scripts[0], verdict=verdict, scripts=scripts)


def kept():
    return {key: entry["scripts"] for key, entry in Record.read("kept.json").entries.items()}


def test_a_run_of_one_source_keeps_the_scripts_of_others_that_are_alike():
    keep("1", ["one:a", "other:b"])
    keep("1", ["other:b"])
    assert kept() == {"1": ["one:a", "other:b"]}
    summary("kept.json", {"1": ["other:b"]}, whole=False)
    assert kept() == {"1": ["one:a", "other:b"]}


def test_a_whole_run_forgets_what_is_no_more(capsys):
    keep("1", ["one:a", "one:gone", "other:b"])
    keep("3", ["one:gone"])
    assert summary("kept.json", NAMES, whole=True) == 0
    assert kept() == {"1": ["one:a", "other:b"]}
    assert capsys.readouterr().out == "kept.json: 1 of 2 command lines are good, 0 are not\n"


@pytest.mark.parametrize(("verdict", "again"), [(OK, False), (LACKS, False), (BAD, True)])
def test_only_what_is_not_as_it_should_be_runs_again(verdict, again):
    keep("1", NAMES["1"], verdict)
    assert Record.read("kept.json").passed("1") is not again


def test_a_refusal_for_want_of_memory_is_counted_and_no_failure(capsys):
    keep("1", NAMES["1"], LACKS)
    keep("2", NAMES["2"])
    assert summary("kept.json", NAMES, whole=True) == 0
    assert "1 of 2 command lines are good, 0 are not, 1 more lack memory" in capsys.readouterr().out
    keep("2", NAMES["2"], BAD)
    assert summary("kept.json", NAMES, whole=True) == 1


@pytest.mark.parametrize(
    ("headroom", "differences", "expected"),
    [
        (2.0, (), {"verdict": OK}),
        (-2.0, (), {"verdict": LACKS, "lacking": 2.0, "lines": ["wrong"]}),
        (2.0, ("differs",), {"verdict": BAD, "lines": ["wrong"]}),
        (-2.0, ("differs",), {"verdict": BAD, "lacking": 2.0, "lines": ["wrong"]}),
    ],
)
def test_a_plan_is_good_refused_with_what_it_lacks_or_bad(headroom, differences, expected):
    memory = SimpleNamespace(needed=64.25 * 2**30, headroom=headroom * 2**30)
    made = SimpleNamespace(
        fullest=SimpleNamespace(fullest=memory),
        order=SimpleNamespace(differences=differences, waiting=()),
        problems=["wrong"] if headroom < 0 or differences else [],
        kinds=(1, 2),
    )
    assert plans.outcome_of(made) == {"kinds": 2, "gibibytes": 64.2, **expected}


def test_a_script_that_is_planned_with_the_kernels_of_npus_needs_no_other_plan():
    one, other = (plans.Planned((Script("mindspeed", name, ()),), ("--num-layers", name)) for name in "12")
    Record.read("planned_npu.json").add(one.key, script="mindspeed:1", verdict=LACKS, scripts=["mindspeed:1"])
    assert [plans.is_wanted("planned.json", each) for each in (one, other)] == [False, True]
    assert plans.is_wanted("planned_npu.json", one)


def test_a_made_up_file_is_the_same_in_every_checkout(monkeypatch, tmp_path):
    keys = set()
    for folder in ("one", "other"):
        monkeypatch.setattr(plans.checked_lines, "LINES", tmp_path / folder / "lines")
        words = ("--fsdp2-config-path", str(tmp_path / folder / "fsdp2_options.yaml"))
        keys.add(plans.Planned((Script("mindspeed", "x", ()),), words).key)
    assert len(keys) == 1
