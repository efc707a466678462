"""Flags of experts with a capacity and of pipelined experts: what they set, what is refused, what is said."""

import pytest

from mindspeed_core.activation import plan_for, prepare
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_moe.features.deepspeed_proofs import DEEPSPEED, NO_DROP, PADDED
from mindspeed_moe.features.pipe_experts_proofs import PIPE
from mindspeed_moe.features.proofs import EP2, GATHERED, MODEL, OVERLAP, SHARED
from mindspeed_moe.options import gshard_options, layer_options
from mindspeed_testing.model_flags import training_flags

INSTALLED = Registry.discover()
ONE = ("--moe-router-topk", "1")
FACTOR = ("--moe-train-capacity-factor",)
WITHOUT_LOSS = tuple(
    flag for at, flag in enumerate(MODEL) if "--moe-aux-loss-coeff" not in MODEL[max(at - 1, 0) : at + 1]
)


def prepared(*flags):
    return prepare(training_flags(flags, 1, INSTALLED), platform="cpu", registry=INSTALLED, host="standalone")


def options(*flags):
    found = prepared(*flags)
    return layer_options(found.args, found.plan.names)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((*MODEL, *FACTOR, "1.5"), "add --moe-model-type deepspeed_moe, or drop it"),
        ((*MODEL, "--expert-interval", "2"), "--expert-interval is --moe-layer-freq; use that one"),
        ((*MODEL, "--no-use-rts"), "--no-use-rts is one of another model type"),
        (DEEPSPEED, "without experts there is nothing to route to"),
        ((*MODEL, *DEEPSPEED, *FACTOR, "0"), "--moe-train-capacity-factor 0 leaves no place"),
        (
            (*MODEL, *DEEPSPEED, "--moe-router-topk", "3"),
            "with --moe-router-topk 3: a token has 1 or 2 choices",
        ),
        ((*MODEL, *NO_DROP, *FACTOR, "2"), "nothing is dropped at any factor"),
        ((*MODEL, *DEEPSPEED, "--moe-dynamic-padding"), "--moe-dynamic-padding needs --moe-no-drop"),
        ((*MODEL, *DEEPSPEED, "--expert-interval", "0"), "--expert-interval 0 is no number of layers"),
        (
            (*MODEL, *DEEPSPEED, "--expert-interval", "2", "--moe-layer-freq", "1"),
            "--expert-interval 2 and --moe-layer-freq 1 say where experts are",
        ),
        ((*MODEL, *DEEPSPEED, "--moe-token-dispatcher-type", "allgather"), "exchanged by an all-to-all"),
        ((*MODEL, *DEEPSPEED, "--moe-expert-capacity-factor", "1"), "is --moe-train-capacity-factor here"),
        ((*MODEL, *DEEPSPEED, "--fix-router"), "router"),
        (
            (*WITHOUT_LOSS, *DEEPSPEED, "--moe-router-load-balancing-type", "sinkhorn"),
            "use --moe-use-sinkhorn instead",
        ),
        (
            (*MODEL, *DEEPSPEED, "--moe-router-load-balancing-type", "seq_aux_loss"),
            "its loss balances first choices over the batch; use aux_loss or none",
        ),
        (
            (*MODEL, *EP2, *DEEPSPEED, *OVERLAP, "--moe-zero-memory", "level0"),
            "places of experts are not sent again",
        ),
        (
            (*MODEL, *SHARED, *EP2, *DEEPSPEED, "--moe-shared-expert-overlap"),
            "the dispatcher calls no shared experts",
        ),
        ((*MODEL, *DEEPSPEED, "--moe-dropless"), "which drops tokens; use --moe-no-drop instead"),
        ((*MODEL, "--moe-dropless", "--moe-expert-capacity-factor", "1"), "that one drops tokens"),
        (
            (*MODEL, *EP2, *PIPE, "--pipe-experts-multi-data", "2"),
            "--pipe-experts-multi-data 2 cuts the capacity of experts",
        ),
        (
            (*MODEL, *EP2, *DEEPSPEED, "--pipe-experts-multi-stream"),
            "--pipe-experts-multi-stream needs --use-pipe-experts",
        ),
        ((*GATHERED, *EP2, *PIPE), "it is the all-to-all that is cut by experts"),
        ((*MODEL, *EP2, *PIPE, "--moe-permute-fusion"), "rows are sorted for all experts at once"),
        ((*MODEL, *DEEPSPEED, *PIPE), "--expert-model-parallel-size 1 has no communication to hide"),
        (
            (*MODEL, *EP2, *NO_DROP, *PIPE, "--pipe-experts-multi-data", "2"),
            "with --moe-no-drop, --moe-dynamic-padding too",
        ),
        ((*MODEL, *EP2, *DEEPSPEED, *PIPE, *OVERLAP), "layer-schedule"),
        (
            (*MODEL, *EP2, *DEEPSPEED, *PIPE, "--pipe-experts-multi-data", "0"),
            "--pipe-experts-multi-data 0 is no number of slices",
        ),
        ((*MODEL, *EP2, *DEEPSPEED, "--pipe-experts-multi-data", "2"), "needs --use-pipe-experts"),
        (
            (*MODEL, *EP2, *DEEPSPEED, *PIPE, "--gemm-gradient-accumulation-fusion"),
            "weight gradients of experts are computed one by one",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(flags, message):
    with pytest.raises(PlanError) as error:
        prepared(*flags)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ((*DEEPSPEED, "--enable-token-rearrange-opt"), "--enable-token-rearrange-opt has no effect"),
        ((*DEEPSPEED, "--noisy-gate-policy", "RSample"), "two are made without noise, as in MindSpeed"),
        (NO_DROP, "megatron-core's dropless layer but for the balance loss"),
        ((*DEEPSPEED, *FACTOR, "0.5"), "0.5 is decided by each rank on its tokens"),
        ((*PADDED, "--moe-use-sinkhorn"), "--moe-use-sinkhorn balances the tokens of a rank"),
        (("--moe-dropless",), "--moe-dropless has no effect"),
        (
            (*DEEPSPEED, *PIPE, "--num-experts", "2"),
            "--use-pipe-experts has no effect: a rank has one expert and one slice",
        ),
        (
            (*PIPE, "--pipe-experts-multi-stream"),
            "--pipe-experts-multi-stream has no effect: whole experts gather nothing beside exchanges",
        ),
    ],
)
def test_what_changes_nothing_or_depends_on_the_layout_is_said(flags, note):
    assert any(note in str(said) for said in prepared(*MODEL, *EP2, *flags).plan.notes)


@pytest.mark.parametrize("host", ["standalone", "library", "megatron-lm"])
def test_every_host_takes_the_flags(host):
    flags = [*MODEL[2:], *EP2, *DEEPSPEED, *PIPE, "--expert-interval", "2"]
    made, _ = plan_for(flags, platform="cpu", host=host, registry=INSTALLED)
    assert {"moe-deepspeed", "moe-pipe-experts", "moe-core"} <= set(made.names)


def test_flags_set_what_the_host_builds():
    at = MODEL.index("--moe-token-dispatcher-type")
    model = (*MODEL[:at], *MODEL[at + 2 :])
    found = prepared(*model, *DEEPSPEED, *ONE, "--expert-interval", "2").args
    assert found.moe_token_dispatcher_type == "alltoall"
    assert found.moe_layer_freq == 2
    assert found.moe_router_pre_softmax


def test_random_selection_is_on_unless_it_is_switched_off():
    assert options(*MODEL, *DEEPSPEED, *ONE).gshard.random_tokens
    assert not options(*MODEL, *DEEPSPEED, *ONE, "--no-use-rts").gshard.random_tokens


def test_a_pipeline_of_one_item_is_none():
    assert options(*MODEL, *EP2, *DEEPSPEED, *PIPE).slices == 1
    assert options(*MODEL, *EP2, *DEEPSPEED, *PIPE, "--num-experts", "2").slices is None


def test_whole_experts_that_are_kept_apart_train_as_without(mindspeed_equivalence):
    layout = (*MODEL, *EP2, *DEEPSPEED)
    mindspeed_equivalence((*layout, *PIPE, "--pipe-experts-multi-stream"), layout, world_size=2, steps=1)


@pytest.mark.parametrize(("choices", "noise"), [("1", "RSample"), ("2", None)])
def test_noise_that_draws_one_choice_is_none_beside_two(choices, noise):
    found = prepared(*MODEL, *DEEPSPEED, "--noisy-gate-policy", "RSample", "--moe-router-topk", choices)
    assert gshard_options(found.args).noise == noise
