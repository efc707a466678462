"""``patches``: every patch with its owner, of everything installed or of one plan."""

from __future__ import annotations

import json
import sys

from made_packages import feature_source

PATCHED = (
    'patches = (Patch("torch:nowhere", "x:y", "has no other way", versions="torch>=2.6", also=("a:b",)),)'
)


def test_patches_of_installed_features_name_target_owner_kind_and_reason(features, install):
    install("pack-a", feature_source("thing-a", PATCHED))

    output = features("patches", "--platform", "cpu").output

    line = next(line for line in output.splitlines() if line.startswith("torch:nowhere"))
    assert line.split()[1:3] == ["thing-a", "replace"]
    assert "has no other way" in line


def test_verbose_adds_versions_and_further_holders(features, install):
    install("pack-a", feature_source("thing-a", PATCHED))

    output = features("patches", "--platform", "cpu", "--verbose").output

    assert "torch>=2.6" in output
    assert "a:b" in output


def test_with_flags_only_patches_of_the_plan_are_listed(features, install):
    install("pack-a", feature_source("thing-a", PATCHED))
    install("pack-b", feature_source("thing-b"))

    without = features("patches", "--platform", "cpu", "--", "--thing-b").output
    active = features("patches", "--platform", "cpu", "--", "--thing-a").output

    assert "torch:nowhere" not in without
    assert "torch:nowhere" in active


def test_patches_of_the_platform_are_listed_with_their_owner(features):
    from mindspeed_core.registry import Registry

    declared = Registry.discover().platform("cpu")().patches()

    found = json.loads(features("patches", "--platform", "cpu", "--json").output)

    own = [patch["target"] for patch in found if patch["owner"] == "platform cpu"]
    assert own == [patch.target for patch in declared]


def test_on_a_terminal_symbols_with_one_reason_are_one_line(install, capsys, monkeypatch):
    from mindspeed_core.cli.features import main

    many = 'patches = tuple(Patch(f"torch:gone_{n}", "x:y", "one reason for all") for n in range(7))'
    install("pack-a", feature_source("thing-a", many))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    assert main(["patches", "--platform", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("thing-a ")]
    assert line.split() == ["thing-a", "7", "of", "torch", "one", "reason", "for", "all"]
    assert len(lines) < 50
