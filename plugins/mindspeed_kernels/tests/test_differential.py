"""Every public operator on random calls, against formulas in float64: values and gradients."""

import pytest
import torch
from differential import attention, experts, products, quantized, ranks, rows  # noqa: F401
from differential.case import GENERATORS, WORLD_GENERATORS, public_operators
from differential.draws import Draws
from differential.judge import Leaves, run_case

QUICK, THOROUGH, CHECKED = 24, 100, 2
OPERATORS = sorted(GENERATORS)
"""The operators that one process can call."""


def test_every_public_operator_has_a_generator():
    without = set(public_operators()) - set(GENERATORS) - set(WORLD_GENERATORS)
    assert sorted(without) == [], "write a generator in differential/, with a formula of its own"


def test_no_generator_is_for_an_operator_that_is_gone():
    assert sorted({*GENERATORS, *WORLD_GENERATORS} - set(public_operators())) == []


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_its_formula(name):
    for seed in range(QUICK):
        run_case(name, GENERATORS[name], seed)


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_its_formula_in_a_hundred_further_calls(name):
    for seed in range(QUICK, QUICK + THOROUGH):
        run_case(name, GENERATORS[name], seed)


DIFFERENTIABLE = [
    "cross_entropy",
    "grouped_matmul",
    "npu_dropout_add_layer_norm",
    "npu_dropout_add_rms_norm",
    "npu_ffn",
    "npu_fusion_attention",
    "npu_gmm",
    "npu_gmm_v2",
    "npu_lightning_indexer",
    "npu_moe_token_permute",
    "npu_moe_token_permute_with_routing_map",
    "npu_moe_token_unpermute",
    "npu_moe_token_unpermute_with_routing_map",
    "npu_rotary_position_embedding",
    "npu_sparse_lightning_indexer_grad_kl_loss",
    "rms_norm",
    "scaled_masked_softmax",
    "swiglu",
    "triangle_attention",
]


def check_gradients(name, seed):
    """Let torch differentiate the operator itself by small differences, whatever its formula says."""
    case = GENERATORS[name](Draws(seed, checkable=True))
    leaves = Leaves(case, "cpu")
    operator = public_operators()[name]

    def call(*_):
        result = operator(*leaves.args, **leaves.options)
        results = case.results(result) if case.results else result
        results = results if isinstance(results, (list, tuple)) else (results,)
        return tuple(one for one in results if one.is_floating_point() and one.requires_grad)

    assert torch.autograd.gradcheck(call, leaves.followed), f"seed {seed}"


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_small_differences_are_what_the_gradient_says(name):
    for seed in range(CHECKED):
        check_gradients(name, seed)


@pytest.mark.thorough
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_small_differences_are_what_the_gradient_says_in_further_calls(name):
    for seed in range(CHECKED, 6 * CHECKED):
        check_gradients(name, seed)


def test_every_differentiable_operator_is_differentiated_by_small_differences():
    followed = {name for name in OPERATORS if GENERATORS[name](Draws(0, checkable=True)).gradients}
    assert followed == set(DIFFERENTIABLE)


def test_a_hundred_calls_of_each_are_more_than_three_thousand():
    assert (len(OPERATORS) + len(WORLD_GENERATORS)) * THOROUGH >= 3000
