"""``verify``: runs the proofs that apply, and never mistakes their absence for success."""

from __future__ import annotations

import json

import pytest
from made_packages import feature_source

from mindspeed_testing import verify as harness
from mindspeed_testing.compare_sides import Compared
from mindspeed_testing.verify import Verdict

PROOF = """verify = (
    Scenario("same", flags=("--{name}",)),
    Scenario("npu-only", flags=("--{name}",), platforms=("npu",)),
)"""


@pytest.fixture
def proofs(monkeypatch):
    """Stands in for real trainings: ``failing`` names features whose proofs fail; ``run`` lists what ran."""

    class Proofs:
        failing: tuple[str, ...] = ()
        run: list[tuple[str, str, str]] = []

    recorded = Proofs()
    recorded.run = []

    def verify(feature, scenario, *, platform=None, contracts=None, hook_api=""):
        recorded.run.append((feature.name, scenario.name, platform))
        good = feature.name not in recorded.failing
        differences = () if good else ("parameters: embedding differs by 0.3",)
        sides = (Compared("2 ranks (tp 2)", "1 rank", 1e-5, {"losses": 3, "feature state": 0}),)
        error = 1e-7 if good else 0.3
        return Verdict(
            feature.name, scenario.name, good, 1e-5, error, 4, differences=differences, sides=sides
        )

    monkeypatch.setattr(harness, "verify", verify)
    return recorded


@pytest.fixture
def things(install):
    install("pack-a", feature_source("thing-a", PROOF.format(name="thing-a")))
    install("pack-b", feature_source("thing-b", PROOF.format(name="thing-b")))


@pytest.mark.usefixtures("things")
def test_named_features_are_proved_on_the_chosen_platform(features, proofs):
    result = features("verify", "thing-a", "--platform", "cpu")

    assert result.exit_code == 0, result.output
    assert proofs.run == [("thing-a", "same", "cpu")]
    assert "left out: thing-a / npu-only (not for platform cpu)" in result.output


@pytest.mark.usefixtures("things", "proofs")
def test_it_says_what_was_compared_in_which_layouts(features):
    command = ("verify", "thing-a", "--platform", "cpu")
    printed, found = features(*command).output, json.loads(features(*command, "--json").output)

    assert "\n        losses: 2 ranks (tp 2) against 1 rank\n" in printed
    (sides,) = found["verdicts"][0]["sides"]
    assert sides == {
        "side": "2 ranks (tp 2)",
        "reference": "1 rank",
        "tolerance": 1e-5,
        "quantities": {"losses": 3, "feature state": 0},
    }


@pytest.mark.usefixtures("things")
def test_a_failed_proof_fails_the_command_and_says_what_differs(features, proofs):
    proofs.failing = ("thing-b",)

    result = features("verify", "thing-a", "thing-b", "--platform", "cpu")

    assert result.exit_code == 1
    assert "passed  thing-a / same" in result.output
    assert "FAILED  thing-b / same" in result.output
    assert "embedding differs by 0.3" in result.output


@pytest.mark.usefixtures("things")
def test_all_proves_every_installed_feature(features, proofs):
    features("verify", "--all", "--platform", "cpu")

    assert {("thing-a", "same", "cpu"), ("thing-b", "same", "cpu")} <= set(proofs.run)


@pytest.mark.usefixtures("proofs")
def test_a_feature_without_a_proof_is_a_failure(features, install):
    install("pack-a", feature_source("thing-a"))

    result = features("verify", "thing-a", "--platform", "cpu")

    assert result.exit_code == 1
    assert "carries no scenario" in result.output


@pytest.mark.usefixtures("proofs")
def test_a_feature_that_trains_nothing_is_left_out_with_its_reason(features, install):
    install("pack-a", feature_source("thing-a", 'trains_nothing = "it prints a list and ends"'))

    result = features("verify", "thing-a", "--platform", "cpu")

    assert "thing-a (it prints a list and ends)" in result.output
    assert "FAILED" not in result.output


@pytest.mark.usefixtures("proofs")
def test_proving_nothing_is_no_success(features, install):
    install("pack-a", feature_source("thing-a", 'verify = (Scenario("x", flags=(), platforms=("npu",)),)'))

    result = features("verify", "thing-a", "--platform", "cpu")

    assert result.exit_code == 1
    assert "nothing was proved" in result.output


@pytest.mark.usefixtures("things")
def test_json_carries_every_verdict(features, proofs):
    proofs.failing = ("thing-b",)

    found = json.loads(features("verify", "thing-a", "thing-b", "--platform", "cpu", "--json").output)

    assert found["ok"] is False
    assert [(v["feature"], v["passed"]) for v in found["verdicts"]] == [("thing-a", True), ("thing-b", False)]
    assert found["left_out"] == [f"thing-{name} / npu-only (not for platform cpu)" for name in "ab"]


@pytest.mark.usefixtures("proofs")
def test_a_dry_run_leaves_out_what_depends_on_data_and_says_so(features, install):
    proof = 'fake_tensors = False\nverify = (Scenario("same", flags=("--thing-a",)),)'
    install("pack-a", feature_source("thing-a", proof))

    result = features("verify", "thing-a", "--fake")

    assert "left out: thing-a / same (thing-a: what is computed depends on data)" in result.output
    assert result.exit_code == 1


@pytest.mark.parametrize("arguments", [(), ("thing-a", "--all")])
def test_names_and_all_exclude_each_other_and_one_is_needed(features, arguments):
    assert features("verify", *arguments).exit_code == 2
