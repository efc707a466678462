"""Cases that could train wrongly in silence: mixed dtypes, overflow, foreign weights, a closed session."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from optimizer_runs import inner, opened, train

from mindspeed_core.errors import SessionError
from mindspeed_core.feature import hookimpl
from mindspeed_testing.worlds import run_world

SHARDED = ("--bf16", "--clip-grad", "0.5", "--use-distributed-optimizer")
HALF = (*SHARDED, "--grad-reduce-in-bf16", "--overlap-grad-reduce", "--overlap-param-gather")
FP16 = ("--fp16", "--initial-loss-scale", str(2**40), "--hysteresis", "1", "--clip-grad", "0.5")
REUSE, SWAP = ("--reuse-fp32-param",), ("--swap-optimizer", "--swap-optimizer-times", "3")
UNCHECKED = "--no-check-for-nan-in-loss-and-grad"
ZEROS = ("--log-num-zeros-in-grad",)
MIXED = "float32 parameters among others"
INFINITE = "an infinity in float32 parameters"
CASES = {
    MIXED: (HALF, REUSE),
    "float32 parameters among others, whole": (HALF[:3], REUSE),
    "overflow": ((*FP16, "--use-distributed-optimizer"), ("--release-fp32-grad",)),
    "overflow, whole": (FP16, ("--release-fp32-grad",)),
    INFINITE: (
        (*FP16[:1], "--initial-loss-scale", "1024", *FP16[3:], "--use-distributed-optimizer"),
        ("--release-fp32-grad",),
    ),
    "accumulation, zeros": ((*HALF, *ZEROS, "--global-batch-size", "8"), SWAP),
    "weights from outside": (SHARDED, REUSE),
    "weights from outside, swapped": (SHARDED[:3], SWAP),
    "a NaN": ((*SHARDED, UNCHECKED), REUSE),
    "a NaN, half-up": ((*SHARDED, UNCHECKED), (*REUSE, "--reuse-fp32-rounding", "half-up")),
    "experts": (
        (
            *(*HALF, "--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32"),
            *("--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall", "--swiglu"),
            "--disable-bias-linear",
        ),
        (*REUSE, "--virtual-optimizer", "0.0001"),
    ),
}
THOROUGH = (
    *("float32 parameters among others, whole", "overflow, whole", "weights from outside, swapped"),
    *("overflow", "accumulation, zeros", "weights from outside", "a NaN, half-up", "experts"),
)


def _in_dtype(dtype, module, given, output):
    return output.to(dtype)


class FinalNormInFloat32:
    """Makes parameters of one layer float32 before buffers are made of them."""

    @hookimpl(wrapper=True)
    def wrap_ddp(self, model):
        for chunk in model:
            for name, module in chunk.named_modules():
                if name.endswith("final_layernorm"):
                    module.register_forward_hook(partial(_in_dtype, module.weight.dtype))
                    module.float()
        return (yield)


class InfinityInFloat32(FinalNormInFloat32):
    """Makes one of their gradients infinite in the second step."""

    def __init__(self):
        self.steps = 0

    @hookimpl(wrapper=True)
    def finalize_gradients(self, model):
        result = yield
        self.steps += 1
        for chunk in model:
            for name, parameter in chunk.named_parameters():
                if "final_layernorm" in name and self.steps == 2:
                    parameter.main_grad.view(-1)[0] = math.inf
        return result


def change_weights(run, value=None):
    """Overwrite a weight, and tell the optimizer."""
    for chunk in run.model:
        for name, parameter in chunk.named_parameters():
            if name.endswith("linear_fc1.weight"):
                parameter.data.mul_(0.5) if value is None else parameter.data.view(-1)[:4].fill_(value)
    run.optimizer.reload_model_params()


def trained(name, flags):
    probes = [FinalNormInFloat32()] if "float32" in name else []
    if name == INFINITE:
        probes = [InfinityInFloat32()]
    with opened(*flags, probes=probes) as run:
        found = train(run, 2)
        if "outside" in name:
            change_weights(run)
        if "NaN" in name:
            change_weights(run, math.nan)
        found += train(run, 3)
        weights = [p.detach().float().clone() for chunk in run.model for p in chunk.parameters()]
        dtypes = {p.dtype for o in inner(run) for group in o.param_groups for p in group["params"]}
        return found, weights, dtypes


def run_cases(names):
    return {
        name: (trained(name, layout), trained(name, (*layout, *flags)))
        for name, (layout, flags) in CASES.items()
        if name in names
    }


def step_after_closing():
    with opened(*SHARDED, *REUSE) as run:
        train(run, 1)
        parts = run.optimizer.chained_optimizers
    try:
        parts[0].optimizer.step()
    except SessionError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def cases(asked_for):
    # Some tests look at cases of their own.
    names = {MIXED, INFINITE, *asked_for("case")}
    return run_world(run_cases, 2, sorted(names), timeout=390)


def named(*names):
    return [pytest.param(name, marks=[pytest.mark.thorough] * (name in THOROUGH)) for name in names]


@pytest.mark.parametrize("case", named(*(name for name in CASES if "NaN" not in name)))
def test_steps_are_those_of_adamw(cases, case):
    for rank in cases:
        (plain, weights, _), (own, own_weights, _) = rank[case]
        assert str(own) == str(plain)
        assert all(torch.equal(one, other) for one, other in zip(own_weights, weights))


def test_parameters_of_both_dtypes_were_updated(cases):
    dtypes = {dtype for rank in cases for dtype in rank[MIXED][1][2]}
    assert dtypes == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize("case", named("overflow", "overflow, whole"))
def test_steps_that_overflow_are_skipped(cases, case):
    skipped = [norm for _, norm in cases[0][case][1][0]]
    assert None in skipped


def test_an_infinite_gradient_of_a_float32_parameter_is_found(cases):
    for rank in cases:
        norms = [norm for _, norm in rank[INFINITE][1][0]]
        assert [norm is None for norm in norms] == [False, True, False, False, False]


@pytest.mark.parametrize("case", named("a NaN", "a NaN, half-up"))
def test_a_loss_that_is_not_finite_stays_so(cases, case):
    for rank in cases:
        losses = [loss for loss, _ in rank[case][1][0]]
        assert all(math.isfinite(loss) for loss in losses[:2])
        assert all(math.isnan(loss) for loss in losses[2:])


def test_after_the_session_the_former_optimizer_refuses_to_step():
    (said,) = run_world(step_after_closing, 1, timeout=200)
    assert "a session that is closed; build the optimizer again" in said
