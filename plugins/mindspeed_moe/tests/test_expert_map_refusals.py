"""Flags of moving and of copied experts: what cannot work is refused with flag, value and way out."""

import pytest

from mindspeed_core.activation import plan_for, prepare
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_moe.features.expert_map_proofs import EIGHT, HOT
from mindspeed_moe.features.proofs import EP2, OVERLAP, TP2
from mindspeed_testing.model_flags import training_flags

INSTALLED = Registry.discover()
MOVES = ("--enable-expert-placement",)


def plan(*flags):
    line = training_flags(flags, 1, INSTALLED)
    return prepare(line, platform="cpu", registry=INSTALLED, host="standalone").plan


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((*EIGHT, *MOVES), "--expert-model-parallel-size 1 has one rank for all experts; use 2 or more"),
        (
            (*EIGHT, *EP2, *MOVES, "--expert-placement-freq", "0"),
            "--expert-placement-freq 0 is no number of steps between two plans; use 1 or more",
        ),
        (
            (*EIGHT, *EP2, *MOVES, "--fine-grained-expert-placement-thre", "0"),
            "--fine-grained-expert-placement-thre 0.0 would move experts for nothing; use a number above 0",
        ),
        ((*EIGHT, *EP2, "--print-expert-load"), "add --enable-expert-placement, or drop it"),
        ((*EIGHT, *EP2, "--expert-placement-freq", "7"), "--expert-placement-freq 7 changes nothing"),
        ((*EIGHT, "--num-experts", "2", *EP2, *MOVES), "one expert on each rank"),
        ((*EIGHT, *EP2, *MOVES, "--use-megatron-fsdp"), "it cuts experts in its own way"),
        ((*EIGHT, *EP2, *MOVES, *HOT), "expert-map"),
        (MOVES, "there are no experts to move"),
        ((*EIGHT, *HOT), "--expert-model-parallel-size 1 has no other rank to copy to; use 2 or more"),
        (
            (*EIGHT, *EP2, *HOT, "--balanced-moe-hot-expert-num", "5"),
            "--balanced-moe-hot-expert-num 5 is no number of experts of a rank, which has 4; use 1 to 4",
        ),
        (
            (*EIGHT, *EP2, *HOT, "--trans-hot-expert-group-num", "3"),
            "--trans-hot-expert-group-num 3 is no number of communicators for 2 copies; use 1 to 2",
        ),
        ((*EIGHT, *EP2, *HOT, "--moe-expert-capacity-factor", "1.0"), "--moe-expert-capacity-factor"),
        ((*EIGHT, *EP2, *HOT, *OVERLAP), "it orders products and weight gradients that copies do not have"),
        ((*EIGHT, *EP2, *HOT, "--gemm-gradient-accumulation-fusion"), "gradients of copies arrive apart"),
        ((*EIGHT, *EP2, *TP2, *HOT), "use --expert-tensor-parallel-size 1"),
        ((*EIGHT, *EP2, "--balanced-moe-hot-expert-num", "2"), "add --balanced-moe-experts, or drop it"),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(flags, message):
    with pytest.raises(PlanError) as error:
        plan(*flags)
    assert message in str(error.value)


@pytest.mark.parametrize("flags", [MOVES, HOT])
def test_the_cost_is_noted(flags):
    (note,) = plan(*EIGHT, *EP2, *flags).notes
    assert "MiB" in str(note)


@pytest.mark.parametrize("host", ["standalone", "library", "megatron-lm"])
@pytest.mark.parametrize(("flags", "name"), [(MOVES, "moe-expert-placement"), (HOT, "moe-balanced-experts")])
def test_every_host_takes_the_flags(host, flags, name):
    made, _ = plan_for([*EIGHT[2:], *EP2, *flags], platform="cpu", host=host, registry=INSTALLED)
    assert name in made.names
