"""Converted checkpoints say what their model needs: loads without it are refused, loads with it accepted."""

import json

import pytest

from mindspeed_core.activation import plan_for, prepare
from mindspeed_core.errors import DataError, UserError
from mindspeed_core.registry import Registry
from mindspeed_megatron.plan_resume import compare_plans, plan_change
from mindspeed_models.families import families
from mindspeed_models.features import DECLARATIONS
from mindspeed_models.weights.needed_features import plan_for_manifest

INSTALLED = Registry.discover()
AFFECTS = {name: bool(record.cls.affects_checkpoint) for name, record in INSTALLED.features.items()}
NEEDED = {
    "llama": set(),
    "qwen2": set(),
    "deepseek-v3": set(),
    "baichuan2": {"lm-norm-weight"},
    "bloom": {"alibi", "embed-layernorm"},
    "gemma": {"gated-gelu", "scaled-embedding"},
    "internlm": {"attention-bias"},
}
TRAIN = ("--micro-batch-size", "1", "--seq-length", "16", "--train-iters", "1", "--lr", "1e-3", "--mock-data")


def tiny(family, **more):
    return {**families()[family].sizes["tiny"], "model_type": family.replace("-", "_"), **more}


def saved(config, family):
    return plan_for_manifest(families()[family].make_plan(config), INSTALLED)


@pytest.mark.parametrize("family", NEEDED)
def test_a_load_is_accepted_with_the_features_of_the_model_and_refused_without(family, tmp_path):
    config = tiny(family)
    found = saved(config, family)
    assert {each["name"] for each in found["features"]} == NEEDED[family]
    # What a manifest holds is read back from text.
    found = json.loads(json.dumps(found))
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = [*TRAIN, "--model", family, "--model-config", str(tmp_path)]
    now = plan_for(flags, platform="cpu", host="standalone", registry=INSTALLED)[0].as_dict()
    assert compare_plans(found, now, AFFECTS).breaking == ()
    without = {"features": [each for each in now["features"] if each["name"] not in NEEDED[family]]}
    refused = compare_plans(found, without, AFFECTS).breaking
    assert len(refused) == len(NEEDED[family])
    assert all("was active when it was written (add --" in each for each in refused)


@pytest.mark.parametrize("kind", ["0", "2"])
def test_biases_by_distance_are_the_same_however_the_kernel_gets_them(kind, tmp_path):
    found = saved(tiny("bloom"), "bloom")
    (tmp_path / "config.json").write_text(json.dumps(tiny("bloom")))
    flags = [*TRAIN, "--model", "bloom", "--model-config", str(tmp_path), "--alibi-fusion-attn-type", kind]
    with prepare(flags, platform="cpu", host="standalone", registry=INSTALLED) as session:
        assert ("alibi-tensor" in session.plan.names) == (kind == "0")
        assert plan_change(session, found).breaking == ()


def test_biases_by_the_root_of_the_distance_are_another_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny("bloom")))
    flags = [*TRAIN, "--model", "bloom", "--model-config", str(tmp_path), "--alibi-fusion-attn-type", "3"]
    with pytest.raises(UserError, match="--alibi-fusion-attn-type is 3, the model has 2"):
        plan_for(flags, platform="cpu", host="standalone", registry=INSTALLED)
    plan_for([*flags, "--override-model-config"], platform="cpu", host="standalone", registry=INSTALLED)


def test_a_choice_of_groups_by_their_best_expert_is_needed_too():
    config = tiny("deepseek-v2", topk_method="group_limited_greedy", n_group=2, topk_group=1)
    (feature,) = saved(config, "deepseek-v2")["features"]
    assert (feature["name"], feature["why"]) == ("best-of-group", "--moe-router-best-of-group")
    assert feature["affects_checkpoint"] is True


def test_a_checkpoint_without_a_feature_is_refused_by_a_run_that_has_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny("gemma")))
    flags = [*TRAIN, "--model-config", str(tmp_path)]
    now = plan_for(flags, platform="cpu", host="standalone", registry=INSTALLED)[0].as_dict()
    refused = compare_plans(saved(tiny("llama"), "llama"), now, AFFECTS).breaking
    assert any("gated-gelu was not active when it was written (drop --geglu" in each for each in refused)


def test_a_model_that_no_installed_package_computes_is_not_converted():
    alone = Registry.of_distributions({"mindspeed-models": ("0", DECLARATIONS)})
    with pytest.raises(DataError, match=r"--position-embedding-type .*alibi.*mindspeed-kernels"):
        plan_for_manifest(families()["bloom"].make_plan(tiny("bloom")), alone)
