"""Flags of CAdam, averaged weights and quantised moments: notes, presence, and refusals with a way out."""

import pytest

from mindspeed_core.activation import plan_for
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_testing.model_flags import training_flags

INSTALLED = Registry.discover()
CADAM = ("--optimizer", "cadam")
EMA = ("--optimizer-selection", "fused_ema_adamw")
FP8 = ("--quant-states", "fp8")
BF16, SHARDED = ("--bf16",), ("--use-distributed-optimizer",)
REUSE, SWAP = ("--reuse-fp32-param",), ("--swap-optimizer",)
VIRTUAL, COMPRESS = ("--virtual-optimizer", "all"), ("--compress-optimizer",)
RELEASE = ("--bf16", "--grad-reduce-in-bf16", "--release-fp32-grad")
PLACED = (
    *("--num-experts", "4", "--moe-ffn-hidden-size", "32", "--moe-token-dispatcher-type", "alltoall"),
    *("--enable-expert-placement", "--expert-model-parallel-size", "2"),
)
AWARE = ("--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16", *SHARDED, *BF16)


def plan(*flags):
    return plan_for(
        training_flags(flags, 1, INSTALLED), platform="cpu", host="standalone", registry=INSTALLED
    )[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((*CADAM, *AWARE), ("opt-cadam", "--use-precision-aware-optimizer", "no other optimizer finds it")),
        ((*CADAM, *FP8), ("--optimizer", "cadam", "the update is AdamW's")),
        ((*CADAM, *SWAP), ("--optimizer", "cadam", "the update is AdamW's")),
        ((*CADAM, *EMA), ("--optimizer-selection fused_ema_adamw", "--optimizer is cadam")),
        ((*EMA, "--optimizer", "sgd"), ("--optimizer-selection fused_ema_adamw", "--optimizer is sgd")),
        ((*EMA, "--ema-decay", "1.5"), ("--ema-decay 1.5", "from 0 to 1")),
        ((*EMA, "--ema-decay", "-0.1"), ("--ema-decay -0.1", "from 0 to 1")),
        ((*EMA, *SWAP), ("--optimizer-selection", "--swap-optimizer")),
        ((*EMA, *VIRTUAL), ("--optimizer-selection", "--virtual-optimizer")),
        ((*EMA, *COMPRESS), ("--optimizer-selection", "--compress-optimizer")),
        ((*EMA, *FP8), ("--optimizer-selection", "--quant-states")),
        ((*EMA, *BF16, *REUSE), ("--optimizer-selection", "--reuse-fp32-param", "as megatron-core keeps")),
        ((*EMA, *RELEASE), ("--optimizer-selection", "--release-fp32-grad", "as megatron-core keeps")),
        ((*EMA, *AWARE), ("opt-ema", "--use-precision-aware-optimizer")),
        ((*EMA, "--optimizer-cpu-offload"), ("opt-ema", "--optimizer-cpu-offload")),
        ((*EMA, *PLACED), ("opt-ema", "moe-expert-placement", "not their average")),
        ((*CADAM, *PLACED), ("--optimizer", "cadam", "does not move with it")),
        ((*FP8, *PLACED), ("moe-expert-placement", "experts that move")),
        ((*CADAM, "--optimizer-cpu-offload"), ("opt-cadam", "--optimizer-cpu-offload")),
        ((*FP8, *BF16, *SHARDED, "--use-megatron-fsdp"), ("--use-megatron-fsdp", "buffers of its own")),
        ((*FP8, *SWAP), ("--quant-states", "--swap-optimizer")),
        ((*FP8, *VIRTUAL), ("--quant-states", "--virtual-optimizer")),
        ((*FP8, *COMPRESS), ("--quant-states", "--compress-optimizer")),
        ((*FP8, "--use-torch-fsdp2"), ("--use-torch-fsdp2", "parts of its own")),
        (
            (*FP8, *BF16, *REUSE, "--reuse-fp32-ties", "sign"),
            ("--quant-states", "use --reuse-fp32-ties list"),
        ),
        (("--quant-states", "mxfp8"), ("--quant-states mxfp8", "use --quant-states fp8")),
        (("--quant-states", "hif8"), ("--quant-states hif8", "use --quant-states fp8")),
        (("--quant-states", "int4"), ("--quant-states", "int4")),
    ],
)
def test_what_cannot_work_is_refused_with_flag_and_way_out(flags, words):
    with pytest.raises(PlanError) as caught:
        plan(*flags)
    said = str(caught.value)
    assert all(word in said for word in words), said


def notes_of(*flags):
    return [note.text for note in plan(*flags).notes if note.feature == "opt-cadam"]


def test_hyper_parameters_that_look_like_adams_are_named():
    (said,) = notes_of(*CADAM, "--lr", "1e-3", "--weight-decay", "0.1", "--adam-beta1", "0.9")
    for word in ("--adam-beta1 0.9 (use 0.965)", "--lr 0.001", "--min-lr", "--weight-decay 0.1"):
        assert word in said


def test_hyper_parameters_of_its_own_are_not_talked_about():
    assert notes_of(*CADAM, "--lr", "1e-4", "--weight-decay", "0.5", "--adam-beta1", "0.965") == []
    assert notes_of(*CADAM, "--lr", "1e-4", "--weight-decay", "0", "--adam-beta1", "0.965") == []


def test_moments_of_8_bits_go_with_other_forms_of_parameters_and_gradients():
    made = plan(*FP8, *RELEASE, *REUSE, *SHARDED, "--optimizer", "fused_adam")
    assert {"opt-quant-states", "block-optimizer", "reuse-fp32-param", "opt-fused-adamw"} <= set(made.names)


def test_a_factor_of_averages_without_averages_is_talked_about():
    made = plan("--ema-decay", "0.5")
    assert "opt-ema" not in made.names
    assert "--ema-decay" in [note.flag for note in made.unread]
