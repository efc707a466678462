"""The declarations: sound, free of heavy imports, refused with a clear message, proved by their scenarios."""

import pytest

from mindspeed_core.activation import prepare
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_kernels.features import DECLARATIONS
from mindspeed_testing.declared import declaration_faults
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.scenarios import scenario_parameters
from mindspeed_testing.verify import assert_equivalent, verify


def test_declarations_are_sound_light_and_on_their_pages():
    assert declaration_faults("mindspeed_kernels.features") == []


def plan(*flags):
    return prepare(
        training_flags(flags, 1),
        platform="cpu",
        registry=Registry.of(DECLARATIONS, "mindspeed-kernels"),
        host="standalone",
    ).plan


def test_all_three_are_active_together():
    active = plan(
        "--swiglu",
        *("--normalization", "RMSNorm"),
        *("--use-fused-rmsnorm", "--use-fused-swiglu", "--use-flash-attn"),
    )
    assert set(active.names) == {"fused-rmsnorm", "fused-swiglu", "flash-attn"}


def test_switches_of_existing_scripts_turn_off_what_they_name():
    off = (
        *("--no-masked-softmax-fusion", "--no-gradient-accumulation-fusion"),
        *("--no-rope-fusion", "--no-bias-swiglu-fusion"),
    )
    assert plan("--swiglu", *off).names == ()
    # Those of Megatron-LM's own kernels go with ours in their places.
    rotary = ("--position-embedding-type", "rope", "--use-fused-rotary-pos-emb")
    names = plan("--swiglu", *off, *rotary, "--use-fused-swiglu", "--use-flash-attn").names
    assert set(names) == {"fused-rope", "fused-swiglu", "flash-attn"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--use-fused-rmsnorm"], "--normalization"),
        (["--use-fused-swiglu"], "--swiglu"),
        (["--use-flash-attn", "--sparse-mode", "6"], "--sparse-mode 6 needs the length of every sample"),
        (["--use-flash-attn", "--sparse-mode", "4", "--next-tockens", "2"], "--next-tockens 2 lets a query"),
        (["--use-flash-attn", "--sparse-mode", "4", "--pre-tockens", "-1"], "nothing to see"),
        (["--use-flash-attn", "--sparse-mode", "8", "--pre-tockens", "2147483647"], "is no limit"),
        (
            ["--position-embedding-type", "alibi", "--use-rotary-position-embeddings"],
            "positions are a bias of attention already",
        ),
        (["--use-flash-attn", "--context-parallel-size", "2"], "--context-parallel-size is 2"),
        (
            ["--use-flash-attn", "--triangle-attn"],
            r"should not be used together.*drop --triangle-attn or --use-flash-attn",
        ),
        (["--triangle-attn", "--triangle-block-size", "0"], "--triangle-block-size 0"),
        (["--use-fused-masked-softmax", "--use-flash-attn"], "flash attention has no softmax"),
        (
            ["--position-embedding-type", "alibi", "--context-parallel-size", "2"],
            "context-parallel-size is 2",
        ),
        (
            ["--use-gradient-accumulation-fusion", "--no-gradient-accumulation-fusion"],
            "the one asks for what the other turns off",
        ),
        (
            ["--use-fused-masked-softmax", "--no-masked-softmax-fusion"],
            "the one asks for what the other turns off",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(flags, message):
    with pytest.raises(PlanError, match=message):
        plan(*flags)


# Gated layers and experts are cut, stacked and flattened on their way into a checkpoint.
ALWAYS = ("fused-swiglu-resume", "grouped-experts-resume")


@pytest.mark.parametrize(
    ("feature", "scenario"), scenario_parameters(DECLARATIONS, platform="cpu", always=ALWAYS)
)
def test_scenarios(feature, scenario):
    verdict = verify(feature, scenario, platform="cpu")
    assert verdict.passed, str(verdict)


def test_all_three_together_keep_an_interleaved_pipeline_as_it_is():
    model = (
        *("--adam-eps", "1e-3"),
        *("--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear"),
        *("--group-query-attention", "--num-query-groups", "2", "--position-embedding-type", "rope"),
        *("--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"),
    )
    features = ("--use-fused-rmsnorm", "--use-fused-swiglu", "--use-flash-attn")
    assert_equivalent((*model, *features), model, world_size=2, tolerance=2e-5)
