"""Every rule of the contract bites, and says what to change."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import bad_plugins
import pytest

from mindspeed_core.discovery.stages import core_stages
from mindspeed_testing.contract import Contract, Violation, all_checks, contract_checks, sessions
from mindspeed_testing.leak_check import ProcessState


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    bad_plugins.install(folder)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield folder
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.startswith("bad_") and name != "bad_plugins"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def checks(site):
    """Every check of the bad distributions, by its name."""
    found = {}
    kinds = "features sessions providers extensible heavy load version resuming"
    for dist in (f"bad-{kind}" for kind in kinds.split()):
        found |= {str(check): check for check in all_checks(Contract.of(dist, platform="cpu"))}
    return found


@pytest.mark.parametrize(
    ("check", "words"),
    [
        ("page[bad-page]", 'no page: docs = "bad_features:docs/bad-page.md"'),
        ("page[bad-lost-page]", "the installed package has no such file"),
        ("page[bad-unmentioned]", "does not mention --bad-unmentioned"),
        ("flags-documented[bad-help]", "--bad-help has no help text"),
        ("flags-read[bad-deaf]", "nothing in bad_features reads args.bad_unheard, so --bad-unheard"),
        ("platforms-known[bad-platform]", "platform 'cuba' is not installed; did you mean 'cuda'?"),
        ("platforms-known[bad-fallback]", "gives no reason"),
        ("platforms-known[bad-fallback]", "'bad-nobody' is no installed feature"),
        ("names-known[bad-requirement]", "--no-such-flag, which nobody defines"),
        ("names-known[bad-requirement]", "its requirement on --no-such-flag gives no reason"),
        ("names-known[bad-conflict]", "did you mean '--swiglu'?"),
        ("names-known[bad-name]", "did you mean 'bad-nothing'?"),
        ("patches-stated[bad-patch]", "its patch of torch:add does not say what it was written for"),
        ("proofs-stated[bad-proofless]", "it carries no proof"),
        ("proofs-stated[bad-claim]", "it states that it trains nothing and ends no program"),
        ("proofs-stated[bad-claim]", "has the stage train_step, the slot norm: carry a proof of it"),
        ("proofs-stated[bad-silent-claim]", "trains_nothing = 'nothing' is no sentence"),
        ("proofs-stated[bad-proved-claim]", "it carries proofs and states that it trains nothing"),
        ("proofs-stated[bad-idle-proof]", "the feature is not active"),
        ("proofs-stated[bad-twice]", "2 of its proofs are called 'one'"),
        ("proofs-stated[bad-both-sides]", "baseline: the feature is active"),
        ("proofs-stated[bad-same-feature]", "baseline: the feature is not active with '--bf16'"),
        ("proofs-stated[bad-resume]", "resume: the feature is not active with '--bf16'"),
        ("proofs-stated[bad-flags]", "--bad-flaggs"),
        ("resume-proved[bad-never-resumed]", "no proof saves, resumes and continues in another layout"),
        ("conflicts-resolvable[bad-hidden]", "its conflict with --bad-level never shows"),
        ("platform-declared[nameless]", "its class has the name 'other', its entry point 'nameless'"),
        ("platform-declared[nameless]", "it is like 'cqu', which is no installed platform"),
        ("platform-declared[nameless]", "it does not implement probe()"),
        ("platform-declared[boastful]", "probe() returns True, not an Availability"),
        ("host-declared[absent]", "No module named 'bad_providers.nowhere'"),
        ("command-declared[plain]", "not a click command"),
        ("command-declared[mute]", "it has no help"),
        ("command-declared[mindspeed-train sample]", "has a command 'sample' of its own"),
        ("command-declared[mindspeed-train sample]", "not a click command"),
        ("command-declared[mindspeed-train --loud]", "'--loud' is no word"),
        ("command-declared[mindspeed-train shadowed]", "--traceback never reaches it"),
        ("requires-the-core[bad-heavy]", "does not require the core"),
        ("requires-the-core[bad-providers]", "of any version"),
        ("declarations-are-light[bad-heavy]", "imports numpy"),
        ("declarations-are-light[bad-heavy]", "bad_heavy/deep.py:1"),
        ("extensible-as-declared[bad-extensible]", "has no @hookspec bad_absent"),
        ("extensible-as-declared[bad-extensible]", "stage bad_mute has no docstring"),
        ("extensible-as-declared[bad-extensible]", "StageSpecs(collecting=...) do not agree"),
        ("extensible-as-declared[bad-extensible]", "the @hookspec bad_secret"),
        ("extensible-as-declared[bad-extensible]", "names the module bad_extensible.nowhere"),
        ("extensible-as-declared[bad-extensible]", "extension point bad.point has no summary"),
        ("extensible-as-declared[bad-extensible]", "its check bad_extensible.declared:absent"),
        ("loads[bad-load]", "unknown attribute 'sumary'"),
        ("loads[bad-load]", "did you mean 'flags'?"),
        ("loads[bad-load]", "did you mean 'slots'?"),
        ("loads[bad-load]", "feature bad-yield is broken: stage 'train_step': its wrapper has no yield"),
        ("loads[bad-load]", "feature bad-same-flag is broken: flag --bad-nothing means different things"),
        ("loads[bad-load]", "bad-ahead comes before bad-behind (says bad-ahead)"),
        ("names-known[bad-before]", "did you mean 'bad-nothing'?"),
        ("answers[bad-enabled]", "its enabled() fails in bad-features 1.0: AttributeError"),
        ("answers[bad-enabled]", "getattr(args, name, default)"),
        ("answers[bad-presets]", "its presets() fails in bad-features 1.0: AttributeError"),
        ("answers[bad-preset]", "it presets seed although nobody asks for it"),
        ("answers[bad-notes]", "its notes() fails in bad-features 1.0: AttributeError"),
        ("answers[bad-init]", "its __init__() fails in bad-features 1.0: TypeError"),
    ],
)
def test_a_rule_about_declarations_bites_and_names_the_remedy(checks, check, words):
    with pytest.raises(Violation) as caught:
        checks[check]()

    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("check", "words"),
    [
        ("closes-clean[bad-leak]", "torch.manual_sneed is new"),
        ("closes-clean[bad-environment]", "environment variable BAD_VARIABLE changed"),
        ("closes-clean[bad-attribute]", "torch.nn.functional.dropout is another object"),
        ("closes-clean[bad-model]", "RuntimeError: no model today"),
        (
            "closes-clean[bad-second-yield]",
            "feature 'bad-second-yield' of bad-sessions 1.0: its wrapper of stage 'train_step' yields a",
        ),
        ("roles-stated[bad-roles]", 'write slots = ("norm",) or replaces_roles = ("final_layernorm",)'),
        ("roles-stated[bad-role-name]", "did you mean 'fc1'?"),
        ("platform-trains[spilling]", "torch.spilled is new"),
        ("platform-trains[lost]", "a Place names the node, the device and its model"),
        ("platform-trains[lost]", "memory_snapshot() wrote nothing"),
        ("proof[bad-proof, same]", "FAILED"),
    ],
)
def test_a_rule_about_sessions_bites_and_shows_what_it_saw(checks, check, words):
    with pytest.raises(Violation) as caught:
        checks[check]()

    assert words in str(caught.value)


def test_a_role_that_is_stated_or_contained_is_no_violation(checks):
    with pytest.raises(Violation) as caught:
        checks["roles-stated[bad-roles]"]()

    assert "fc1" not in str(caught.value)
    assert "proj" not in str(caught.value)


def test_what_is_sound_beside_bad_features_passes(checks):
    passed = [check for name, check in checks.items() if name.endswith("[bad-quiet]")]

    assert len(passed) == 11
    for check in passed:
        check()


def test_a_feature_that_ends_the_program_instead_of_training_carries_no_proof(checks):
    checks["proofs-stated[bad-searching]"]()
    checks["resume-proved[bad-searching]"]()


def test_a_proof_is_planned_with_its_files(checks):
    checks["proofs-stated[bad-filed]"]()


def test_only_features_that_train_and_could_know_of_it_have_to_prove_that_they_resume(checks):
    checks["resume-proved[bad-server]"]()
    checks["resume-proved[bad-quiet]"]()


def test_a_flag_that_says_why_it_has_no_effect_needs_no_reader(checks):
    checks["flags-read[bad-excused]"]()


def test_a_version_that_is_too_low_for_what_is_used_is_found(site, monkeypatch):
    later = replace(core_stages()["should_stop"], since="1.4")
    monkeypatch.setitem(core_stages(), "should_stop", later)
    (check,) = (c for c in contract_checks("bad-version", proofs=False) if c.rule == "hook-interface")
    with pytest.raises(Violation, match=r"states HookApi\('1\.0'\): state '1\.4'"):
        check()


def test_an_unchanged_process_shows_no_leak():
    before = ProcessState.now()

    assert ProcessState.now().left_since(before) == []


def test_a_default_that_torch_sets_on_first_use_is_no_leak_and_a_changed_one_is(monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    before = ProcessState.now()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "there")
    there = ProcessState.now()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")

    assert there.left_since(before) == []
    assert ProcessState.now().left_since(there) == ["environment variable TORCHINDUCTOR_CACHE_DIR changed"]


@pytest.mark.parametrize(
    "dist",
    [
        "mindspeed-core",
        "mindspeed-megatron",
        "mindspeed-train",
        "mindspeed-profile",
        pytest.param("mindspeed-kernels", marks=pytest.mark.thorough),
        pytest.param("mindspeed-cp", marks=pytest.mark.thorough),
        pytest.param("mindspeed-moe", marks=pytest.mark.thorough),
        pytest.param("mindspeed-memory", marks=pytest.mark.thorough),
        pytest.param("mindspeed-pp", marks=pytest.mark.thorough),
        pytest.param("mindspeed-tp", marks=pytest.mark.thorough),
        pytest.param("mindspeed-optim", marks=pytest.mark.thorough),
        pytest.param("mindspeed-models", marks=pytest.mark.thorough),
    ],
)
def test_what_this_repository_ships_keeps_the_contract(dist):
    # Its proofs are run by the tests of each plugin.
    wrong = violations(contract_checks(dist, platform="cpu", proofs=False))

    assert not wrong, "\n".join(wrong)


def violations(checks):
    """Return the problems, one text per check."""
    wrong = []
    for check in checks:
        try:
            check()
        except Violation as violation:
            wrong.append(f"{check}: {violation}")
    return wrong


def pytest_run(*arguments, cwd):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200)


def test_the_option_runs_nothing_but_the_contract_and_prints_no_traceback(site, tmp_path):
    (tmp_path / "test_mine.py").write_text("def test_mine():\n    assert False\n")
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.path.insert(0, {str(site)!r})\n")
    answer = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--contract", "bad-heavy"],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=200,
    )

    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert "2 failed, 3 passed" in answer.stdout
    assert "its metadata does not require the core" in answer.stdout
    assert "Traceback" not in answer.stdout


def test_an_unknown_distribution_is_one_message(tmp_path):
    answer = pytest_run("--contract", "no-such-dist", cwd=tmp_path)

    assert answer.returncode == 4
    assert "'no-such-dist' is not installed" in answer.stderr


def test_a_session_of_a_proof_with_files_finds_them_on_every_rank(site, monkeypatch):
    seen = []

    def run_world(function, size, sides, **options):
        seen.extend(Path(side.flags[1]).read_text() == bad_plugins.PAGE for side in sides)
        return [[sessions.Trained({})] for _ in range(size)]

    monkeypatch.setattr(sessions, "run_world", run_world)
    side = sessions.Side(
        "x", ("--bad-filed", "{files}/page.md"), (), "cpu", "cpu", files=("bad_features:page.md",)
    )
    sessions._closes_clean(sessions._Sessions({2: [side]}), "x")
    assert seen == [True]
