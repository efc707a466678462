"""The manual for authors of plugins shows what the example packages are, and every rule of the contract."""

from __future__ import annotations

import re

import pytest
from markdown_files import ROOT, blocks, read

from mindspeed_core.hooks import API_VERSION
from mindspeed_testing.contract import Contract, all_checks, entry_points, features

MANUAL = "docs/writing-a-plugin.md"
SHOWN = [block.text.partition("\n") for block in blocks(read(MANUAL), "python")]
FIVE = "tests/plugins/acme_five"
FOLDERS = ("examples/", f"{FIVE}/")
NAMED = [(first.removeprefix("# "), body) for first, _, body in SHOWN]
EXAMPLES = [(path, body) for path, body in NAMED if path.startswith(FOLDERS)]
NAMES = [f"{number} {path}" for number, (path, _) in enumerate(EXAMPLES)]


@pytest.mark.parametrize(("path", "body"), EXAMPLES, ids=NAMES)
def test_a_block_of_the_manual_is_a_piece_of_the_file_it_names(path, body):
    assert body.rstrip() in (ROOT / path).read_text(encoding="utf-8")


def test_every_example_package_is_shown():
    packages = {path.name for path in (ROOT / "examples" / "plugins").iterdir() if path.is_dir()}

    assert {path.split("/")[2] for path, _ in EXAMPLES if not path.startswith(FIVE)} == packages


def test_every_feature_that_changes_the_training_is_shown():
    modules = {path.name for path in (ROOT / FIVE / "src/acme_five").glob("*.py")}

    assert {path.split("/")[-1] for path, _ in EXAMPLES if path.startswith(FIVE)} == modules - {
        "__init__.py",
        "proof_files.py",
    }


def trains(check):
    return check.rule in ("closes-clean", "roles-stated", "proof")


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=[pytest.mark.thorough] * trains(check))
        for check in all_checks(Contract.of("acme-five", platform="cpu", proofs=False))
    ],
    ids=str,
)
def test_features_written_from_the_manual_keep_the_contract(check):
    check()


def test_the_test_that_the_manual_shows_is_the_one_that_new_writes():
    (body,) = (body for first, _, body in SHOWN if first == "# tests/test_contract.py")
    template = (
        ROOT / "plugins/mindspeed_testing/src/mindspeed_testing/scaffold/plugin/tests/test_contract.py.tmpl"
    )

    assert body.rstrip() in template.read_text(encoding="utf-8").replace("$plugin", "acme-tools")


def test_every_rule_of_the_contract_has_its_row():
    rules = {*entry_points.RULES, *features.RULES}
    for dist in (
        "mindspeed-core",
        "mindspeed-train",
        "acme-platform",
        "acme-noise-scale",
        "acme-soft-cap",
        "mindspeed-toy-needs",
    ):
        rules |= {check.rule for check in all_checks(Contract.of(dist, platform="cpu"))}
    section = read(MANUAL).partition("## The contract")[2].partition("\n## ")[0]

    assert set(re.findall(r"^\| `([a-z-]+)` \|", section, re.MULTILINE)) == rules


@pytest.mark.parametrize("page", [MANUAL, "docs/hook-versions.md"])
def test_the_version_that_pages_tell_plugins_to_state_is_the_present_one(page):
    assert set(re.findall(r'HookApi\("([\d.]+)"\)', read(page))) == {API_VERSION}


def test_every_version_of_the_interface_has_a_row():
    rows = re.findall(r"^\| (\d+\.\d+) \|", read("docs/hook-versions.md"), re.MULTILINE)

    assert rows == [path.stem for path in sorted((ROOT / "tests/contract/hook_api").glob("*.json"))]
