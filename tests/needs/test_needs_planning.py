"""Needs before anything runs: flags, presets, facts, the resolver as an oracle, commands of plugins."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

from mindspeed_core import check_feature
from mindspeed_core.activation import plan_for
from mindspeed_core.cli.features import program
from mindspeed_core.feature import Feature, Flag
from mindspeed_core.flags.flag_set import flag_set
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_testing.model_flags import training_flags


@pytest.fixture(scope="module")
def registry():
    return Registry.discover()


def test_every_toy_is_sound_and_inactive_without_its_flag(registry):
    toys = [name for name in registry.features if name.startswith("toy-")]
    assert len(toys) >= 20
    assert [record for record in registry.broken if record.dist.startswith("mindspeed-toy")] == []
    plan, _ = plan_for(training_flags((), 1), registry=registry, host="standalone")
    assert plan.names == ()


def test_an_alias_is_the_flag_and_a_preset_says_where_values_come_from(registry):
    parsed = flag_set(registry).parse([*training_flags((), 1), "--toy-careful", "strict", "--no-toy-advice"])
    assert parsed.args.toy_calm == "strict"
    assert parsed.args.toy_advice is False
    assert parsed.args.clip_grad == 0.1
    assert parsed.provenance["clip_grad"] == "preset toy-calm"
    assert parsed.provenance["toy_calm"] == "flag --toy-careful"
    # The small model gives --lr, and what a user gives wins over a preset.
    assert parsed.args.lr == 1e-2
    assert parsed.provenance["lr"] == "flag --lr"
    assert parsed.provenance["min_lr"] == "default"


def test_an_inverted_flag_is_true_unless_it_is_given(registry):
    parsed = flag_set(registry).parse([])
    assert parsed.args.toy_advice is True
    assert parsed.provenance["toy_advice"] == "default"


def test_two_features_on_one_slot_exclude_each_other(registry):
    flags = training_flags(("--toy-attention-scale", "2", "--toy-documents", "7"), 1)
    with pytest.raises(PlanError, match="core-attention"):
        plan_for(flags, registry=registry, host="standalone")


def test_a_required_feature_is_implied_and_says_by_whom(registry):
    flags = training_flags(("--toy-v-shape", "--untie-embeddings-and-output-weights"), 1)
    plan, _ = plan_for(flags, registry=registry, host="standalone")
    assert plan.names == ("toy-sequential-schedule", "toy-v-shape")
    assert "toy-v-shape" in plan.features[0].why


def test_a_features_own_check_of_its_arguments_is_a_problem_of_the_plan(registry):
    with pytest.raises(PlanError, match="--toy-init-depth 2 is below --num-layers 4"):
        plan_for(training_flags(("--toy-init-depth", "2"), 1), registry=registry, host="standalone")


COMMAND = """
import sys
from mindspeed_core.cli.features import main
try:
    main()
finally:
    print(sorted({"torch", "megatron"} & set(sys.modules)))
"""

ORACLE = """
import sys
from mindspeed_core.registry import Registry
from mindspeed_core.flags.flag_set import flag_set
from mindspeed_core.resolver.resolve import resolve
registry = Registry.discover()
parsed = flag_set(registry).parse(["--toy-groups", "--optimizer", "toy-lion", "--toy-numbers"])
digests = {
    resolve(registry, parsed.args, provenance=parsed.provenance, platform="cpu").digest for _ in range(1000)
}
print(len(digests), sorted({"torch", "megatron", "numpy", "pluggy"} & set(sys.modules)))
"""


def test_the_resolver_gives_one_plan_a_thousand_times_without_torch():
    shown = subprocess.run([sys.executable, "-c", ORACLE], capture_output=True, text=True, check=True)
    assert shown.stdout.split(maxsplit=1) == ["1", "[]\n"]


def test_facts_are_data_and_unknown_ones_are_refused(registry):
    facts = registry.features["toy-attention-scale"].cls
    assert facts.fake_tensors is True
    assert facts.deterministic is True
    assert facts.affects_checkpoint is False
    assert facts.formulas["flop"] == "num_layers // 2 * seq_length * hidden_size"
    assert facts.tuning["--toy-attention-scale"] == (0.5, 1.0, 2.0)

    class Misspelled(Feature):
        name = "toy-misspelled"
        family = "toys"
        summary = "has a fact that nobody knows"
        flags = (Flag("--toy-misspelled"),)
        determinstic = True

    assert any("determinstic" in problem for problem in check_feature(Misspelled))
    found = Registry.of([Misspelled, facts])
    assert "toy-misspelled" not in found.features
    assert "toy-attention-scale" in found.features
    assert any(record.feature == "toy-misspelled" for record in found.broken)


def test_a_plugins_command_runs_without_a_process_group():
    arguments = ["toy-size", "--num-layers", "4", "--hidden-size", "64"]
    shown = subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments], capture_output=True, text=True, check=True
    )
    assert shown.stdout == "196608 parameters in 4 layers\n[]\n"


def test_a_plugins_command_reports_wrong_flags_like_the_programs_own():
    result = CliRunner().invoke(program, ["toy-size", "--num-layer", "4"])
    assert result.exit_code == 2
    assert "--num-layers" in result.output
