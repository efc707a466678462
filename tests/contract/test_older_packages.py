"""A package that was written for hook interface 1.0 keeps its contract, and is told of newer rules."""

from __future__ import annotations

import warnings

import pytest

from mindspeed_testing.contract import NewerRuleWarning, Violation, contract_checks
from mindspeed_testing.contract.rules import Wrong, hold


@pytest.fixture(scope="module")
def told():
    """What each check of the package warns of; all of them pass."""
    return kept(contract_checks("acme-first", platform="cpu", proofs=False))


@pytest.fixture(scope="module")
def told_of_proofs():
    """The same of its proofs."""
    return kept(check for check in contract_checks("acme-first", platform="cpu") if check.rule == "proof")


def kept(checks):
    said = {}
    for check in checks:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            check()
        found = [str(w.message) for w in caught if issubclass(w.category, NewerRuleWarning)]
        said |= {str(check): found} if found else {}
    return said


def test_a_package_of_the_first_interface_is_green_and_told_of_newer_rules(told):
    assert sorted(told) == [
        "flags-read[acme-counted]",
        "proofs-stated[acme-beat]",
        "proofs-stated[acme-louder]",
        "resume-proved[acme-counted]",
        "resume-proved[acme-louder]",
    ]


@pytest.mark.parametrize(
    ("check", "cure"),
    [
        ("proofs-stated[acme-beat]", "verify = (Scenario(…),)"),
        ("proofs-stated[acme-louder]", "same_feature=True"),
        ("resume-proved[acme-counted]", "resume=Resume("),
        ("flags-read[acme-counted]", "read it, drop it, or say with unread()"),
    ],
)
def test_a_newer_rule_names_its_cure_and_the_interface_that_demands_it(told, check, cure):
    (text,) = told[check]

    assert cure in text
    assert "this one is for 1.0" in text


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("check", "cure"),
    [
        ("proof[acme-louder, tp2]", "same_feature=True"),
        ("proof[acme-counted, single]", "extra_losses=('counted share',)"),
    ],
)
def test_a_proof_of_the_first_interface_passes_and_is_told_what_it_does_not_say(told_of_proofs, check, cure):
    (text,) = told_of_proofs[check]

    assert cure in text


def test_a_rule_holds_whoever_states_its_interface_and_warns_whoever_states_an_older_one():
    def rule():
        yield Wrong("mend it", "1.2")

    with pytest.raises(Violation, match="mend it"):
        hold(rule, written_for="1.2")
    with pytest.warns(NewerRuleWarning, match=r"packages of hook interface 1\.2 or later"):
        hold(rule, written_for="1.1")
