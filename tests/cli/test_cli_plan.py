"""``plan``: what flags switch on, or every problem at once; never a traceback."""

from __future__ import annotations

import json
import random

import pytest
from click.testing import CliRunner
from made_packages import feature_source

from mindspeed_core.cli.features import program

PRESET = """
@classmethod
def presets(cls, args):
    return {"seed": 4321} if args.thing_a else {}
"""


def test_active_features_are_listed_in_order_with_the_reason(features, install):
    install("pack-a", feature_source("thing-a", 'requires = (Requirement(feature="thing-b", implies=True),)'))
    install("pack-b", feature_source("thing-b", 'slots = ("norm",)'))

    result = features("plan", "--platform", "cpu", "--", "--thing-a")

    assert result.exit_code == 0, result.output
    rows = [line for line in result.output.splitlines() if line.strip()[:1].isdigit() and line[0] == " "]
    assert [row.split()[1] for row in rows] == ["thing-b", "thing-a"]
    assert "implied by thing-a" in rows[0]
    assert "--thing-a" in rows[1]
    assert "fills norm" in rows[0]


def test_flags_are_understood_without_the_double_dash(features, install):
    install("pack-a", feature_source("thing-a"))

    assert "thing-a" in features("plan", "--thing-a", "--platform", "cpu").output


def test_what_the_level_holds_back_is_listed(features, install):
    install("pack-a", feature_source("thing-a", "level = 2"))

    result = features("plan", "--platform", "cpu", "--", "--thing-a", "--optimization-level", "0")

    assert result.exit_code == 0, result.output
    assert "held back" in result.output
    assert "no feature is active" in result.output


def test_a_value_that_a_preset_chose_is_shown_with_its_origin(features, install):
    install("pack-a", feature_source("thing-a", PRESET))

    output = features("plan", "--platform", "cpu", "--", "--thing-a").output

    assert "seed = 4321 (preset thing-a)" in output


NOTING = """
before = ("thing-b",)

@classmethod
def notes(cls, args):
    return [f"seed {args.seed} is as good as any"]
"""


def test_notes_and_stated_order_are_printed_and_part_of_the_json(features, install):
    install("pack-a", feature_source("thing-a", NOTING))
    install("pack-b", feature_source("thing-b"))
    flags = ("--platform", "cpu", "--", "--thing-a", "--thing-b", "--seed", "7")

    output = features("plan", "--all", *flags).output
    data = json.loads(features("plan", "--json", *flags).output)

    assert "order\n  thing-a comes before thing-b (says thing-a)" in output
    assert "notes\n  thing-a: seed 7 is as good as any" in output
    assert data["notes"] == ["thing-a: seed 7 is as good as any"]
    assert data["stated_order"] == ["thing-a comes before thing-b (says thing-a)"]


def test_all_problems_are_reported_at_once_with_remedies(features, install):
    install(
        "pack-a", feature_source("thing-a", 'requires = (Requirement(feature="thing-b", reason="its base"),)')
    )
    install("pack-b", feature_source("thing-b"))

    result = features("plan", "--platform", "cpu", "--", "--thing-a", "--thing-bb", "--micro-batch-size", "x")

    assert result.exit_code == 1
    for text in (
        "E-REQUIRES",
        "its base",
        "E-UNKNOWN-FLAG",
        "--thing-bb",
        "E-FLAG-VALUE",
        "--micro-batch-size",
    ):
        assert text in result.output
    assert result.output.count("->") >= 2


def test_problems_as_json_carry_code_feature_flag_reason_and_remedy(features, install):
    install(
        "pack-a",
        feature_source("thing-a", 'conflicts = (Conflict(feature="thing-b", reason="same buffers"),)'),
    )
    install("pack-b", feature_source("thing-b"))

    result = features("plan", "--platform", "cpu", "--json", "--", "--thing-a", "--thing-b")
    found = json.loads(result.output)

    assert result.exit_code == 1
    assert found["ok"] is False
    assert [problem["code"] for problem in found["problems"]] == ["E-CONFLICT"]
    assert set(found["problems"][0]) == {"code", "feature", "flag", "value", "reason", "remedy"}
    assert "same buffers" in found["problems"][0]["reason"]


def test_a_plan_as_json_names_platform_features_and_digest(features, install):
    install("pack-a", feature_source("thing-a"))

    found = json.loads(features("plan", "--platform", "cpu", "--json", "--", "--thing-a").output)

    assert found["ok"] is True
    assert found["platform"] == "cpu"
    assert [feature["name"] for feature in found["features"]] == ["thing-a"]
    assert len(found["digest"]) == 64


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_an_unknown_host_is_one_message(features, as_json):
    result = features("plan", "--host", "nowhere", *as_json, "--", "--seed", "1")

    assert result.exit_code == 1
    assert "nowhere" in result.output
    assert "standalone" in result.output


def test_an_unknown_option_of_click_is_a_usage_error(features):
    assert features("list", "--no-such-option").exit_code == 2


VALUES = (
    "", "-1", "0", "1", "2", "nan", "inf", "1e309", "9" * 400, "x" * 5000, "\U0001f680", "--", "-", "=",
    "None", "True", "[]", "a b", "\t", "../..", "/dev/null", "%s", "{}", "1,2", "0x10", "\u0661",
)  # fmt: skip


def test_a_thousand_generated_command_lines_never_end_in_a_traceback(install, monkeypatch):
    """Flags of host, core and features with values from good to absurd: exit status 0 or 1, every time."""
    from mindspeed_core.flags.flag_set import flag_set
    from mindspeed_core.registry import Registry

    install("pack-a", feature_source("thing-a", 'requires = (Requirement(feature="thing-b", reason="r"),)'))
    install("pack-b", feature_source("thing-b", "slots = ('norm',)"))
    install("pack-c", feature_source("thing-c", "slots = ('norm',)\nplatforms = ('npu',)"))
    installed = Registry.discover()
    monkeypatch.setattr(Registry, "discover", lambda: installed)
    options = sorted({o for entry in flag_set(installed, "standalone").entries for o in entry.flag.options})
    assert len(options) > 40
    chooser = random.Random(20240607)
    statuses = set()
    for _ in range(1000):
        flags = []
        for _ in range(chooser.randint(0, 6)):
            option = chooser.choice([*options, "--" + "".join(chooser.choices("abc-=.", k=5))])
            value = chooser.choice(VALUES)
            form = chooser.randint(0, 2)
            flags += [[option], [option, value], [f"{option}={value}"]][form]
        result = CliRunner().invoke(program, ["plan", "--platform", "cpu", "--", *flags])
        expected = result.exception is None or isinstance(result.exception, SystemExit)
        assert expected, (flags, result.exception)
        assert result.exit_code in (0, 1), (flags, result.output)
        statuses.add(result.exit_code)
    assert statuses == {0, 1}
