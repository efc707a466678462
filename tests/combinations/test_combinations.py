"""Features of several families together learn what one process learns without any of them."""

import pytest
from drawn import LAYOUTS, MODELS, OPTIONS, SCHEDULES, Draw, accepted, drawn, problem

BYTES = "--swap-min-bytes 16"
ATTENTION = f"--use-flash-attn --swap-attention {BYTES}"
COC = "--use-ascend-coc --coc-parallel-num 2"
NANO = "--use-nanopipe --use-nanopipe-swap --num-virtual-stages-per-pipeline-rank 2"
EXPERTS = ("--pipeline-schedule zb-h1", "--moe-alltoall-overlap-comm", f"--swap-modules mlp {BYTES}")
TOGETHER = (
    # The schedule computes gradients of weights that autograd saved inside of another feature's hooks.
    Draw("llama", "tp pp", ("--pipeline-schedule zbv", ATTENTION, COC, "--recompute-activation-function")),
    Draw("llama", "pp dp", (NANO, "--recompute-norm", "--swap-optimizer")),
    Draw("experts", "ep pp", EXPERTS),
    # Prediction layers are copies of the decoder's last one, norms of features included.
    Draw("predictions", "tp", ("--use-fused-rmsnorm", "--use-fused-swiglu", "--use-flash-attn")),
    # Linears add gradients in place inside of hooks on saved tensors, and their reduction overlaps.
    Draw("gpt", "dp", (ATTENTION, "--use-gradient-accumulation-fusion")),
)


@pytest.mark.parametrize("draw", TOGETHER, ids=str)
def test_features_together_learn_what_one_process_learns(draw):
    assert accepted(draw) == draw
    assert problem(draw) == ""


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(200))
def test_a_drawn_combination_is_refused_or_right(seed):
    draw = accepted(drawn(seed))
    found = problem(draw)
    assert not found or found.startswith("refused: "), f"{draw}\n{found}"


def test_draws_reach_every_model_layout_and_option():
    draws = [drawn(seed) for seed in range(1000)]
    assert {draw.model for draw in draws} == MODELS.keys()
    assert {draw.layout for draw in draws} == LAYOUTS.keys()
    assert {option for draw in draws for option in draw.options} == {*OPTIONS, *SCHEDULES}


def test_a_flag_that_comes_twice_has_its_last_value():
    draw = Draw("gpt", "pp", ("--lm-loss-chunks 2", "--swap-optimizer", "--lm-loss-chunks 4"))
    assert draw.flags == ("--pipeline-model-parallel-size", "2", "--lm-loss-chunks", "4", "--swap-optimizer")
