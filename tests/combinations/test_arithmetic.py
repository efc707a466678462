"""Flags that change what is learnt, with features of all families, against one process and definitions."""

import arithmetic
import dense_draws
import pytest
from arithmetic import ARITHMETIC, Arithmetic, drawn_arithmetic
from dense_draws import DenseDraw, drawn_dense

from mindspeed_testing.dense_model import DenseOptions
from mindspeed_testing.numbered_batches import MASKS

PER_TOKEN = "--calculate-per-token-loss"
OVERLAPPED = "--moe-grouped-gemm --moe-alltoall-overlap-comm"
DROPS = "--moe-router-topk 2 --moe-expert-capacity-factor 0.5 --moe-token-drop-policy position"
TOGETHER = (
    Arithmetic("llama", "tp cp", ("--softmax-type learnable", PER_TOKEN), ("--use-fused-rmsnorm",), "uneven"),
    Arithmetic("predictions", "dp", (PER_TOKEN,), ("--use-flash-attn",), "half", resumed=True),
)
EXPERTS = (
    DenseDraw(
        (f"{DROPS} --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.3", PER_TOKEN),
        DenseOptions(
            per_token=True,
            balance={"seq_aux_loss": 0.3},
            routing={"capacity_factor": 0.5, "policy": "position"},
        ),
        "ep",
        2,
        ("--moe-token-dispatcher-type alltoall", OVERLAPPED),
        "uneven",
    ),
)


@pytest.mark.parametrize("draw", TOGETHER, ids=str)
def test_flags_that_change_what_is_learnt_do_so_on_every_layout(draw):
    assert arithmetic.accepted(draw) == draw
    assert arithmetic.problem(draw) == ""


@pytest.mark.parametrize("draw", EXPERTS, ids=str)
def test_experts_are_those_of_their_definition(draw):
    assert dense_draws.accepted(draw) == draw
    assert dense_draws.problem(draw) == ""


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(150))
def test_a_drawn_combination_is_refused_or_right(seed):
    draw = arithmetic.accepted(drawn_arithmetic(seed))
    found = arithmetic.problem(draw)
    assert not found or found.startswith("refused: "), f"{draw}\n{found}"


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(150))
def test_drawn_experts_are_refused_or_those_of_their_definition(seed):
    draw = dense_draws.accepted(drawn_dense(seed))
    found = dense_draws.problem(draw)
    assert not found or found.startswith("refused: "), f"{draw}\n{found}"


def test_draws_reach_every_change_mask_and_feature():
    draws = [drawn_arithmetic(seed) for seed in range(1000)]
    assert {draw.model for draw in draws} == ARITHMETIC.keys()
    for model, changes in ARITHMETIC.items():
        assert {change for draw in draws if draw.model == model for change in draw.changes} == {*changes}
    dense = [drawn_dense(seed) for seed in range(1000)]
    assert {draw.mask for draw in draws} == {draw.mask for draw in dense} == MASKS.keys()
    assert {draw.layout for draw in dense} == dense_draws.LAYOUTS.keys()
    assert {feature for draw in dense for feature in draw.features} == {*dense_draws.FEATURES}
