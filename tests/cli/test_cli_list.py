"""``list``: what is installed and what is broken, cheaply."""

from __future__ import annotations

import json
import subprocess
import sys

from made_packages import feature_source

HEAVY = ("torch", "megatron", "numpy", "rich", "pluggy", "asyncio", "multiprocessing")
LATE = ("mindspeed_models.recipe", "mindspeed_pp.plan", "mindspeed_tp.plan", "mindspeed_tp.volume")
"""What declarations import when a plan of theirs is made, and no earlier."""


def test_an_installed_feature_is_listed_with_its_flag_package_and_platforms(features, install):
    install("sample-pack", feature_source("sample-thing", 'level = 1\nplatforms = ("cpu", "npu")'))

    lines = features("list", "--all", "--platform", "cpu").output.splitlines()

    assert next(line for line in lines if line.startswith("sample-thing")).split("\t") == [
        "sample-thing",
        "samples",
        "1",
        "ok",
        "stable",
        "--sample-thing",
        "sample-pack 0.1.0",
        "cpu npu",
        "A feature for tests",
    ]


STATES = {
    "thing-ok": ("ok", 'packages = ("click>=1",)'),
    "thing-falls": (
        "falls back",
        'platforms = ("npu",)\nfallback = Fallback("slow", feature="thing-ok")',
    ),
    "thing-out": ("left out", 'platforms = ("npu",)\nfallback = Fallback("nothing to do")'),
    "thing-npu": ("needs npu or cuda", 'platforms = ("npu", "cuda")'),
    "thing-pack": ("needs absent-pack>=2", "packages = (\"absent-pack>=2; platform == 'cpu'\",)"),
    "thing-other": ("needs thing-absent", 'requires = (Requirement(feature="thing-absent"),)'),
}


def test_each_feature_is_one_line_with_its_state_on_the_platform(features, install):
    for name, (_, body) in STATES.items():
        install(f"pack-{name}", feature_source(name, body))

    lines = features("list", "--platform", "cpu", "--family", "samples").output.splitlines()
    rows = [line.split("\t") for line in lines if "\t" in line]

    assert rows[0] == ["feature", "family", "level", "state", "summary"]
    assert {row[0]: row[3] for row in rows[1:]} == {name: state for name, (state, _) in STATES.items()}


def test_json_says_why_a_feature_does_not_work_here_and_what_to_do(features, install):
    install("pack-a", feature_source("thing-pack", STATES["thing-pack"][1]))

    found = json.loads(features("list", "--platform", "cpu", "--json").output)
    (feature,) = [feature for feature in found["features"] if feature["name"] == "thing-pack"]

    assert found["platform"] == "cpu"
    assert (feature["state"], feature["needs"]) == ("needs", "absent-pack>=2")
    assert feature["reason"] == "needs absent-pack>=2, which is not installed"
    assert feature["remedy"] == "pip install 'absent-pack>=2'"


def test_flags_are_listed_with_their_features(features, install):
    install("pack-a", feature_source("thing-a"))

    lines = features("list", "--flags").output.splitlines()

    assert "samples\t--thing-a\tthing-a\tSwitch it on." in lines


def test_a_piped_list_never_pads_columns(features, install):
    install("pack-a", feature_source("thing-a", family="a-family-with-a-name-that-is-longer-than-all-others"))

    assert "  " not in "".join(line for line in features("list").output.splitlines() if "\t" in line)


def test_family_restricts_the_list(features, install):
    install("pack-a", feature_source("thing-a", family="alpha"))
    install("pack-b", feature_source("thing-b", family="beta"))

    output = features("list", "--family", "alpha").output

    assert "thing-a" in output
    assert "thing-b" not in output


def test_an_unknown_family_is_a_usage_error_that_names_the_families(features, install):
    install("pack-a", feature_source("thing-a", family="alpha"))

    result = features("list", "--family", "alphx")

    assert result.exit_code == 2
    assert "alpha" in result.output


def test_json_carries_features_broken_plugins_and_extension_points(features, install):
    install(
        "pack-a", feature_source("thing-a") + 'DECLARATIONS += (ExtensionPoint("a.spot", "pack_a.spots"),)'
    )
    install("pack-b", "import a_module_that_nobody_has")

    result = features("list", "--json")
    found = json.loads(result.output)

    assert result.exit_code == 0
    assert "thing-a" in [feature["name"] for feature in found["features"]]
    assert {"name": "a.spot", "group": "pack_a.spots", "summary": ""} in found["extension_points"]
    broken = next(plugin for plugin in found["broken"] if plugin["dist"] == "pack-b")
    assert "a_module_that_nobody_has" in broken["error"]
    assert broken["remedy"]


def test_broken_lists_only_broken_plugins_and_fails_when_there_are_any(features, install):
    install("pack-a", feature_source("thing-a"))
    healthy = features("list", "--broken")
    install("pack-b", "raise RuntimeError('no such driver')")
    damaged = features("list", "--broken")

    assert (healthy.exit_code, damaged.exit_code) == (0, 1)
    assert "no such driver" in damaged.output
    assert "thing-a" not in damaged.output


def test_an_extension_point_is_listed(features, install):
    source = (
        feature_source("thing-a") + 'DECLARATIONS += (ExtensionPoint("a.spot", "pack_a.spots", "Spots"),)'
    )
    install("pack-a", source)

    assert (
        "extension point a.spot (entry-point group pack_a.spots): Spots" in features("list", "--all").output
    )


def test_listing_and_planning_import_nothing_heavy():
    code = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from mindspeed_core.cli.features import program\n"
        "runs = (['list'], ['list', '--json'], ['plan', '--', '--num-layers', '2'], ['graph'])\n"
        "results = [CliRunner().invoke(program, arguments) for arguments in runs]\n"
        "assert [r.exit_code for r in results] == [0, 0, 0, 0], [r.output for r in results]\n"
        f"print(*[name for name in {HEAVY + LATE!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
