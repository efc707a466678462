"""Whoever starts a run is told which routing depends on the layout, in every host."""

import pytest

from mindspeed_core.activation import plan_for

MODEL = "--num-experts 4 --moe-ffn-hidden-size 32 --disable-bias-linear --num-layers 2"
SPLIT = "--tensor-model-parallel-size 2 --sequence-parallel"
CAPACITY = "--moe-expert-capacity-factor 1.5"
SINKHORN = "--moe-router-load-balancing-type sinkhorn"


def notes(flags, host="standalone"):
    plan, _ = plan_for(f"{MODEL} {flags}".split(), platform="cpu", host=host)
    return [str(note) for note in plan.notes]


@pytest.mark.parametrize("host", ["standalone", "library", "megatron-lm"])
def test_capacity_is_named_where_a_rank_routes_a_part_of_a_sequence(host):
    (note,) = notes(f"{SPLIT} {CAPACITY}", host)
    assert note.startswith("--moe-expert-capacity-factor 1.5 drops tokens in each of the 2 parts")


def test_sinkhorn_is_named_where_a_rank_routes_a_part_of_a_sequence():
    (note,) = notes(f"{SPLIT} {SINKHORN}")
    assert note.startswith("--moe-router-load-balancing-type sinkhorn chooses experts in each of the 2 parts")


@pytest.mark.parametrize("flags", [f"{CAPACITY} {SINKHORN}", SPLIT, f"{SPLIT} --moe-aux-loss-coeff 0.1"])
def test_nothing_is_said_where_the_layout_changes_nothing(flags):
    assert notes(flags) == []
