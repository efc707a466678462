"""Flags of adapters and of a model's ends: sound, refused with flag, value and way out, proved."""

from types import SimpleNamespace

import pytest

from mindspeed_core.activation import plan_for, prepare
from mindspeed_core.registry import Registry
from mindspeed_core.validation import check
from mindspeed_models.features.heads import AttentionBias, EmbeddingNorm, NormHead, ZLoss
from mindspeed_models.features.lora import Lora
from mindspeed_models.lora.targets import modules_of, roles_of
from mindspeed_testing.declared import declaration_faults
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.scenarios import scenario_parameters
from mindspeed_testing.verify import verify

FEATURES = (NormHead, EmbeddingNorm, ZLoss, AttentionBias, Lora)
INSTALLED = Registry.discover()
ALWAYS = ("embed-layernorm-tp2-sp",)
QKV = ("--lora-target-modules", "linear_qkv")
EXPERTS = ("--num-experts", "4", "--moe-router-topk", "2")


def test_declarations_are_sound_light_and_on_their_pages():
    assert declaration_faults("mindspeed_models.features") == []


@pytest.mark.parametrize("host", ["standalone", "library", "megatron-lm"])
@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (QKV, "lora"),
        (("--lm-norm-weight",), "lm-norm-weight"),
        (("--embed-layernorm",), "embed-layernorm"),
        (("--z-loss-weight", "0.1"), "z-loss"),
        (("--row-col-parallel-linear-bias", "--disable-bias-linear"), "attention-bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_host_takes_them(host, flags, name):
    made, _ = plan_for([*flags, "--transformer-impl", "local"], platform="cpu", host=host, registry=INSTALLED)
    assert name in made.names


LATENT = ("--multi-latent-attention", "--kv-lora-rank", "16")


def problems(*flags, world_size=2):
    found = check(training_flags(flags, 1, INSTALLED), world_size=world_size, registry=INSTALLED)
    return "\n".join(map(str, found.problems))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--lora-target-modules", "liner_qkv"), ["--lora-target-modules", "liner_qkv", "linear_qkv"]),
        (("--lora-target-modules", "word_embeddings"), ["--lora-modules-to-save word_embeddings"]),
        (("--lora-target-modules", "router"), ["router", "linear_qkv"]),
        (("--lora-target-modules", "q_a_proj"), ["q_a_proj", "not latent", "linear_qkv"]),
        (
            (*LATENT, "--lora-target-modules", "q_a_proj"),
            ["linear_q_down_proj", "is not given", "linear_q_proj"],
        ),
        (
            (*LATENT, "--q-lora-rank", "16", "--lora-target-modules", "linear_q_proj"),
            ["linear_q_proj", "is given", "linear_q_down_proj"],
        ),
        (("--lora-target-modules", "kv_b_proj"), ["kv_b_proj", "not latent", "linear_qkv"]),
        ((*QKV, "--lora-modules-to-save", "lm_heat"), ["--lora-modules-to-save", "lm_heat", "lm_head"]),
        ((*QKV, "--lora-r", "0"), ["--lora-r 0", "at least 1"]),
        ((*QKV, "--lora-alpha", "0"), ["--lora-alpha 0", "above 0"]),
        ((*QKV, "--lora-dropout", "1"), ["--lora-dropout 1", "below 1"]),
        (
            ("--lora-target-modules", "linear_fc1", *EXPERTS),
            ["--lora-target-modules linear_fc1", "--num-experts 4", "linear_qkv linear_proj"],
        ),
        ((*QKV, "--use-torch-fsdp2"), ["--use-torch-fsdp2", "lora", "--use-distributed-optimizer"]),
        ((*QKV, "--fp8-format", "e4m3"), ["--fp8-format", "8 bits or fewer", "--bf16"]),
        ((*QKV, "--use-megatron-fsdp"), ["--use-megatron-fsdp", "lora"]),
        (("--lora-load", "somewhere"), ["--lora-load somewhere", "--lora-target-modules"]),
        (("--z-loss-weight", "-1"), ["--z-loss-weight -1", "above 0"]),
        (("--z-loss-weight", "1", "--lm-loss-chunks", "2"), ["z-loss", "--lm-loss-chunks"]),
        (("--lm-norm-weight", "--lm-loss-chunks", "2"), ["lm-norm-weight", "--lm-loss-chunks"]),
        (("--row-col-parallel-linear-bias",), ["add --disable-bias-linear"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_does_not_go_is_refused_with_the_way_out(flags, named):
    said = problems(*flags)
    for text in named:
        assert text in said


def plan(*flags):
    return prepare(
        training_flags(flags, 1, INSTALLED), platform="cpu", registry=INSTALLED, host="standalone"
    ).plan


def test_a_name_of_a_part_is_noted():
    notes = "".join(map(str, plan("--lora-target-modules", "q_proj", "gate_proj", "up_proj").notes))
    assert "--lora-target-modules q_proj: megatron-core computes it with others in linear_qkv" in notes
    assert "linear_fc1" not in notes


@pytest.mark.parametrize(
    ("names", "roles"),
    [
        (("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"), ("qkv", "proj", "fc1", "fc2")),
        (("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"), ("qkv", "proj", "fc1", "fc2")),
        (("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"), ("qkv", "proj", "fc1", "fc2")),
        (("W_pack", "proj", "lm_head"), ("qkv", "fc1", "output_layer")),
    ],
)
def test_the_names_of_three_worlds_mean_the_same_linears(names, roles):
    assert roles_of(names) == roles


def test_latent_attention_has_linears_of_its_own():
    assert roles_of(("q_proj", "kv_b_proj", "o_proj"), latent=True) == ("proj", "q_proj", "kv_up_proj")
    assert roles_of(("q_a_proj", "kv_a_proj_with_mqa"), latent=True) == ("q_down_proj", "kv_down_proj")


def test_a_library_session_is_told_that_checkpoints_are_its_own():
    from mindspeed_core.errors import UserError
    from mindspeed_models.lora.checkpoints import refuse_in_library

    session = SimpleNamespace(host=SimpleNamespace(name="library"))
    with pytest.raises(UserError, match="--lora-load there: checkpoints of a library session"):
        refuse_in_library(session, SimpleNamespace(lora_load="there"))


def test_modules_to_save_have_many_names():
    assert modules_of(("embed_tokens", "lm_head", "norm")) == (
        "word_embeddings",
        "output_layer",
        "final_layernorm",
    )


@pytest.mark.parametrize(("feature", "scenario"), scenario_parameters(FEATURES, always=ALWAYS))
def test_scenarios(feature, scenario):
    verdict = verify(feature, scenario)
    assert verdict.passed, str(verdict)


def test_the_flags_of_the_seed_keep_arity_and_defaults():
    flags = {flag.name: flag for flag in Lora.flags}
    assert (flags["--lora-r"].default, flags["--lora-alpha"].default) == (16, 32)
    assert flags["--lora-register-forward-hook"].default == ["word_embeddings", "input_layernorm"]
    assert flags["--lora-adapter-name"].default == "default"
    for name in ("--lora-target-modules", "--lora-modules-to-save", "--lora-register-forward-hook"):
        assert flags[name].nargs == "+"
