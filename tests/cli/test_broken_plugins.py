"""A generated plugin broken in ten ways: one clear message each, and the plugin beside it keeps working."""

from __future__ import annotations

import pytest
from made_packages import feature_source, write_metadata

from mindspeed_core.activation import activate
from mindspeed_core.errors import PatchError
from mindspeed_core.hooks import API_VERSION
from mindspeed_testing.scaffold import create_plugin

HEALTHY = "thing-well"
FLAG_END = '"0 logs none.",\n        ),\n    )'


class Damaged:
    """A generated plugin, installed, with one thing changed."""

    def __init__(self, features, plugin: str) -> None:
        self.features = features
        self.plugin = plugin
        self.feature = f"{plugin}-loss-average"
        self.flag = f"--{plugin}-loss-average"

    def broken_lines(self) -> list[str]:
        """What ``list`` says below ``broken:``; the other plugin is listed as sound."""
        result = self.features("list")
        assert result.exit_code == 0
        table, _, broken = result.output.partition("\nbroken:\n")
        assert HEALTHY in table
        assert self.feature not in table
        return [line.strip() for line in broken.splitlines() if line.strip()]

    def plan(self, *flags: str):
        """``plan`` with the flags; without this plugin's flag the plugin is in nobody's way."""
        well = self.features("plan", "--platform", "cpu", "--", f"--{HEALTHY}")
        assert well.exit_code == 0, well.output
        return self.features("plan", "--platform", "cpu", "--", *(flags or (self.flag, "0.5")))


@pytest.fixture
def damage(features, install, tmp_path, on_path):
    install("well-pack", feature_source(HEALTHY))

    def make(
        plugin: str, *changes: tuple[str, str], prefix: str = "", entry: str = "DECLARATIONS"
    ) -> Damaged:
        create_plugin(plugin, tmp_path)
        site = tmp_path / plugin / "src"
        package = plugin.replace("-", "_")
        path = site / package / "features.py"
        text = path.read_text()
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path.write_text(
            text.replace(
                "from __future__ import annotations\n", f"from __future__ import annotations\n{prefix}\n"
            )
        )
        write_metadata(site, plugin, {f"mindspeed.features {package}": f"{package}.features:{entry}"})
        on_path(site)
        return Damaged(features, plugin)

    return make


def _one_message(lines: list[str], *texts: str) -> None:
    """One message about one thing: a line that has every text, and a line with the remedy."""
    assert len(lines) == 2, lines
    assert [text for text in texts if text not in lines[0]] == []
    assert lines[1].startswith("-> ")
    assert "Traceback" not in "\n".join(lines)


def test_an_entry_point_that_names_nothing(damage):
    plugin = damage("bad-entry", entry="DECLARATION")

    _one_message(plugin.broken_lines(), "bad-entry 0.1.0", "no attribute 'DECLARATION'")


def test_a_missing_dependency(damage):
    plugin = damage("bad-dependency", prefix="import a_package_nobody_has")

    _one_message(plugin.broken_lines(), "bad-dependency 0.1.0", "a_package_nobody_has", "features.py:")


@pytest.mark.parametrize(
    "statement", ["raise RuntimeError('no such driver')", "raise SystemExit('no such driver')"]
)
def test_an_import_that_fails_or_exits(damage, statement):
    plugin = damage("bad-import", prefix=statement)

    _one_message(plugin.broken_lines(), "bad-import 0.1.0", "no such driver")


def test_cyclic_requirements(damage):
    second = (
        "class Second(LossAverage):\n    name = 'bad-cycle-second'\n    flags = (Flag('--second'),)\n"
        "    requires = (Requirement(feature='bad-cycle-loss-average'),)\n    verify = ()\n"
        "LossAverage.requires = (Requirement(feature='bad-cycle-second'),)\n"
        f'DECLARATIONS = (HookApi("{API_VERSION}"), LossAverage, Second)'
    )
    plugin = damage(
        "bad-cycle",
        (f'DECLARATIONS = (HookApi("{API_VERSION}"), LossAverage)', second),
        ("import Feature,", "import Feature, Requirement,"),
    )

    lines = plugin.broken_lines()

    cycle = "bad-cycle-loss-average -> bad-cycle-second -> bad-cycle-loss-average"
    assert len(lines) == 4
    for line, name in zip(lines[::2], ("bad-cycle-loss-average", "bad-cycle-second")):
        assert f"bad-cycle 0.1.0, feature {name}: " in line
        assert cycle in line
    result = plugin.plan()
    assert result.exit_code == 1
    assert "E-BROKEN-PLUGIN" in result.output
    assert cycle in result.output


def test_a_slot_that_nobody_declares(damage):
    plugin = damage("bad-slot", (FLAG_END, FLAG_END + '\n    slots = ("core-atention",)'))

    _one_message(
        plugin.broken_lines(),
        "bad-slot 0.1.0",
        plugin.feature,
        "'core-atention'",
        "did you mean 'core-attention'",
    )


def test_a_flag_with_two_meanings_breaks_the_later_package_and_names_both(damage, features, install):
    plugin = damage("bad-flag")
    other = feature_source("other-thing").replace(
        'Flag("--other-thing"', 'Flag("--bad-flag-loss-average", type=int'
    )
    install("other-pack", other)

    listed = features("list").output
    result = plugin.plan()

    table, _, broken = listed.partition("\nbroken:\n")
    assert plugin.feature in table
    assert broken.startswith("  other-pack 0.1.0, feature other-thing: flag --bad-flag-loss-average means")
    assert "bad-flag 0.1.0" in broken
    assert result.exit_code == 0, result.output
    assert "other-thing: --bad-flag-loss-average is its flag too, but other-pack 0.1.0" in result.output


def test_a_hook_with_an_argument_that_the_stage_does_not_offer(damage):
    plugin = damage("bad-hook", ("run: Run)", "run: Run, microbatch: int)"))

    _one_message(
        plugin.broken_lines(),
        "bad-hook 0.1.0",
        plugin.feature,
        "'train_step'",
        "'microbatch'",
        "run, session",
    )


def test_a_hook_of_a_stage_that_does_not_exist(damage):
    plugin = damage("bad-stage", ("def train_step(", "def train_steps("))

    _one_message(plugin.broken_lines(), "bad-stage 0.1.0", "'train_steps'", "did you mean 'train_step'")


def test_a_patch_whose_target_is_gone(damage):
    patch = (
        '\n    patches = (Patch("megatron.core.utils:no_longer_there", '
        '"bad_patch.loss_average:MovingAverage", "tests it"),)'
    )
    plugin = damage("bad-patch", (FLAG_END, FLAG_END + patch), ("import Feature,", "import Feature, Patch,"))
    assert plugin.plan().exit_code == 0

    with pytest.raises(PatchError) as raised:
        activate([*MODEL, plugin.flag, "0.5"], platform="cpu", host="standalone")

    message = str(raised.value)
    assert "\n\n" not in message
    for text in (plugin.feature, "megatron.core.utils:no_longer_there"):
        assert text in message
    with activate([*MODEL, f"--{HEALTHY}"], platform="cpu", host="standalone") as session:
        assert HEALTHY in session.plan


def test_a_dependency_out_of_range(damage):
    plugin = damage("bad-version", (FLAG_END, FLAG_END + '\n    packages = ("megatron-core>=99",)'))

    result = plugin.plan()

    assert result.exit_code == 1
    for text in ("E-PACKAGE", plugin.feature, "megatron-core", "99", "-> "):
        assert text in result.output
    assert result.output.count("E-") == 1


def test_an_exception_inside_a_hook_names_feature_and_stage(damage):
    plugin = damage("bad-run", ("        result = yield\n", "        1 / 0\n        result = yield\n"))
    assert plugin.plan().exit_code == 0

    with activate([*MODEL, plugin.flag, "0.5"], platform="cpu", host="standalone") as session:
        with pytest.raises(ZeroDivisionError) as raised:
            session.call("train_step", run=None)

    assert raised.value.__notes__ == [
        f"mindspeed: raised in stage 'train_step' by feature '{plugin.feature}'"
    ]
    with activate([*MODEL, f"--{HEALTHY}"], platform="cpu", host="standalone") as session:
        assert HEALTHY in session.plan


MODEL = (
    "--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "8",
    "--max-position-embeddings", "8", "--micro-batch-size", "1", "--global-batch-size", "1",
)  # fmt: skip


@pytest.mark.parametrize(
    ("method", "signature"), [("enabled", "cls, args"), ("presets", "cls, args"), ("validate", "cls, args")]
)
def test_an_exception_in_a_declaration_method_is_one_problem(damage, method, signature):
    body = f"\n\n    @classmethod\n    def {method}({signature}):\n        raise KeyError('gone astray')"
    plugin = damage(
        f"bad-{method}",
        (FLAG_END, FLAG_END + body),
        ("    def validate(cls, args: Any)", "    def _check(cls, args)"),
    )

    result = plugin.features("plan", "--platform", "cpu", "--", plugin.flag, "0.5")

    assert result.exit_code == 1
    assert plugin.feature in result.output
    assert "gone astray" in result.output
    assert result.output.count("E-") == 1
