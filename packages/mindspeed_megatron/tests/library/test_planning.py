"""Sources of a library session's plan: flags in any form, and the configurations at hand."""

import json
import subprocess
import sys
from argparse import Namespace

import pytest
import torch
from library_features import OwnConfig, registry, small
from megatron.core.optimizer import OptimizerConfig

from mindspeed_core import activate, prepare
from mindspeed_core.feature import Feature, Flag
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_megatron.hosts.library import HOST

HERE = {"registry": registry(), "platform": "cpu"}


def codes(caught):
    return [problem.code for problem in caught.value.problems]


@pytest.mark.parametrize("flags", [{"no_bias": True}, ["--no-bias"], Namespace(no_bias=True)])
def test_a_requirement_is_met_by_the_configuration(flags):
    session = prepare(flags, configs=[small()], **HERE)
    assert session.plan.names == ("no-bias",)
    assert session.provenance["normalization"] == "OwnConfig.normalization"
    assert session.provenance["no_bias"] == "flag --no-bias"


def test_a_requirement_is_met_by_flags():
    flags = {"no_bias": True, "normalization": "RMSNorm", "disable_bias_linear": True}
    assert prepare(flags, **HERE).plan.names == ("no-bias",)


def test_a_requirement_that_nothing_meets_is_a_problem():
    with pytest.raises(PlanError) as caught:
        prepare({"no_bias": True}, configs=[small(normalization="LayerNorm")], **HERE)
    assert codes(caught) == ["E-REQUIRES"]
    assert "'LayerNorm'" in str(caught.value)


def test_a_configuration_that_conflicts_is_a_problem():
    with pytest.raises(PlanError) as caught:
        prepare({"no_bias": True}, configs=[small(qk_layernorm=True)], **HERE)
    assert codes(caught) == ["E-CONFLICT"]


def test_a_flag_that_contradicts_the_configuration_is_a_problem():
    with pytest.raises(PlanError) as caught:
        prepare({"normalization": "LayerNorm"}, configs=[small()], **HERE)
    assert codes(caught) == ["E-CONFIG"]
    assert "OwnConfig.normalization" in str(caught.value)


def test_a_field_without_a_value_contradicts_a_flag_that_asks_for_one():
    with pytest.raises(PlanError) as caught:
        prepare({"num_experts": 4}, configs=[small()], **HERE)
    assert codes(caught) == ["E-CONFIG"]
    assert "OwnConfig.num_moe_experts is None" in str(caught.value)


def test_an_optimizer_may_get_its_rate_later():
    session = prepare({"lr": 0.5, "optimizer": "adam"}, configs=[small(), OptimizerConfig()], **HERE)
    assert session.args.lr == 0.5


class Deep(Feature):
    name = "deep"
    family = "samples"
    summary = "Predicts as many tokens as asked"
    flags = (Flag("--deep", type=int, help="How many."),)

    @classmethod
    def enabled(cls, args):
        return args.deep is not None

    @classmethod
    def presets(cls, args):
        return {"mtp_num_layers": args.deep} if args.deep else {}


DEEP = {"registry": Registry.of([Deep]), "platform": "cpu"}


@pytest.mark.parametrize("flags", [{"deep": 2}, ["--deep", "2"], Namespace(deep=2)])
@pytest.mark.parametrize("built", [None, 1])
def test_a_preset_that_the_configuration_contradicts_is_a_problem(flags, built):
    with pytest.raises(PlanError) as caught:
        prepare(flags, configs=[small(mtp_num_layers=built)], **DEEP)
    assert codes(caught) == ["E-CONFIG"]
    assert f"sets mtp_num_layers to 2, but OwnConfig.mtp_num_layers is {built}" in str(caught.value)
    assert "leave --deep out" in str(caught.value)


def test_a_preset_that_the_configuration_has_is_none():
    assert prepare({"deep": 2}, configs=[small(mtp_num_layers=2)], **DEEP).plan.names == ("deep",)


def test_a_later_configuration_is_compared_with_presets_too():
    with activate({"deep": 2}, **DEEP) as session:
        assert session.config(small(mtp_num_layers=2)).mtp_num_layers == 2
        with pytest.raises(PlanError, match="sets mtp_num_layers to 2, but OwnConfig"):
            session.config(small())


def test_of_a_framework_s_namespace_the_configuration_made_from_it_counts():
    session = prepare(Namespace(normalization="LayerNorm", no_bias=True), configs=[small()], **HERE)
    assert session.args.normalization == "RMSNorm"


def test_foreign_attributes_and_types_of_a_namespace_are_no_mistake():
    theirs = Namespace(rollout_engine=object(), optimizer="adamw", main_grads_dtype=torch.bfloat16)
    session = prepare(theirs, **HERE)
    assert session.args.optimizer == "adamw"
    assert not hasattr(session.args, "rollout_engine")


def test_a_wrong_value_of_a_features_own_flag_is_a_problem_in_any_form():
    with pytest.raises(PlanError) as caught:
        prepare(Namespace(no_bias="perhaps"), **HERE)
    assert codes(caught) == ["E-FLAG-VALUE"]


def test_an_unknown_key_of_a_dictionary_names_the_nearest_flag():
    with pytest.raises(PlanError, match="did you mean --no-bias"):
        prepare({"no_bais": True}, **HERE)


def test_a_flag_of_what_the_caller_does_itself_is_refused_with_the_reason():
    with pytest.raises(PlanError, match="checkpoints, logging and stopping are your own loop's"):
        prepare({"save_interval": 10}, **HERE)


def test_a_feature_without_effect_in_a_library_session_is_refused():
    with pytest.raises(PlanError, match="load_checkpoint, which host library leaves") as caught:
        prepare({"only_loads": True}, **HERE)
    assert codes(caught) == ["E-HOST"]
    assert prepare({"only_loads": True}, host="other", **HERE).plan.names == ("only-loads",)


def test_several_configurations_describe_one_training():
    from megatron.core.optimizer import OptimizerConfig

    # What somebody set wins over a default of another object, in either order.
    model, optimizer = small(bf16=True, params_dtype=torch.bfloat16), OptimizerConfig(lr=0.25)
    for configs in ([model, optimizer], [optimizer, model]):
        args = prepare({}, configs=configs, **HERE).args
        assert (args.lr, args.bf16, args.num_layers, args.params_dtype) == (0.25, True, 2, torch.bfloat16)


def test_what_is_no_configuration_is_refused():
    with pytest.raises(TypeError, match="no configuration object"):
        prepare({}, configs=[OwnConfig], **HERE)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"swiglu": True, "add_bias_linear": False, "group_query_attention": False}),
        ({"num_query_groups": 1}, {"group_query_attention": True, "num_query_groups": 1}),
        ({"gated_linear_unit": False, "activation_func": torch.nn.functional.gelu}, {"swiglu": False}),
        ({"layernorm_zero_centered_gamma": True}, {"apply_layernorm_1p": True}),
        ({"layernorm_epsilon": 1e-6}, {"norm_epsilon": 1e-6}),
        (
            {"num_moe_experts": 4, "moe_ffn_hidden_size": 8, "moe_aux_loss_coeff": 0.5},
            {"num_experts": 4, "moe_aux_loss_coeff": [0.5]},
        ),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, {"sequence_parallel": True}),
    ],
)
def test_fields_become_the_arguments_they_would_have_come_from(changes, expected):
    args = prepare({}, configs=[small(**changes)], **HERE).args
    assert {name: getattr(args, name) for name in expected} == expected


def test_a_library_session_can_be_planned_from_the_command_line_without_torch():
    code = (
        "import sys, json\n"
        "from mindspeed_core.activation import plan_for\n"
        "plan, _ = plan_for({'use_fused_rmsnorm': True, 'normalization': 'RMSNorm'}, platform='cpu')\n"
        "print(json.dumps([plan.names, plan.host, 'torch' in sys.modules, 'megatron.core' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["fused-rmsnorm"], "library", False, False]


class Says(Feature):
    name, family, summary = "says", "tests", "notes something"
    flags = (Flag("--says"),)

    @classmethod
    def notes(cls, args):
        return ["a quarter of the heads idles"]


class Unsure(Feature):
    name, family, summary = "unsure", "tests", "reads what a library session lacks"
    flags = (Flag("--unsure"),)

    @classmethod
    def enabled(cls, args):
        return args.of_another_host > 0


def test_notes_and_features_that_fail_unasked_are_logged_once(caplog, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    session = prepare({"says": True}, registry=Registry.of([HOST, Says, Unsure]), platform="cpu")
    for _ in range(2):
        with session:
            pass
    said = [record.getMessage() for record in caplog.records if record.name == "mindspeed_core"]
    assert len(said) == 2
    assert "unsure is left out: its enabled() fails in test 0: AttributeError" in said[0]
    assert said[1] == "mindspeed: says: a quarter of the heads idles"
    assert session.report()["notes"] == ["says: a quarter of the heads idles"]


class Always(Feature):
    name, family, summary = "always", "tests", "is on by itself, and reads what a library session lacks"

    @classmethod
    def enabled(cls, args):
        return True

    @classmethod
    def presets(cls, args):
        return {"num_layers": args.of_another_host}


def test_a_feature_that_fails_unasked_does_not_hinder_a_configuration():
    session = prepare({}, registry=Registry.of([HOST, Always, Unsure]), platform="cpu", configs=[small()])
    session._check(small())
    assert session.plan.names == ()
    assert {held.name for held in session.plan.held_back} == {"always", "unsure"}
