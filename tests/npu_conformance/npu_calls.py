"""Checks of a call, and their messages."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch_npu

from mindspeed_testing.npu import ApiUse, Call, fake_npu, run_call, run_calls
from mindspeed_testing.npu.kernels.contract import Kernel, KernelRefusal
from mindspeed_testing.npu.plugin import never_ran


def one(npu):
    return (npu.tensor(4, 8, requires_grad=True),)


def swiglu(x):
    return torch_npu.npu_swiglu(x, dim=-1)


def failure(call):
    with pytest.raises(AssertionError) as caught:
        run_call(call)
    return str(caught.value)


def test_results_gradients_and_operations_are_handed_back():
    result = run_call(Call("swiglu", swiglu, one, operations=("npu_swiglu", "npu_swiglu_backward")))
    assert [tuple(t.shape) for t in (*result.results, *result.gradients)] == [(4, 4), (4, 8)]
    assert result.operations == {"npu.npu_swiglu.default": 1, "npu.npu_swiglu_backward.default": 1}


def test_another_shape_or_dtype_than_the_reference_is_named():
    said = failure(Call("swiglu", swiglu, one, like=lambda x: x.float()))
    assert "results are bfloat16[4, 4]; the reference's are float32[4, 8]" in said


def test_a_result_that_left_the_device_is_named():
    assert "result 0 is on cpu" in failure(Call("left", lambda x: x.cpu(), one))


def test_a_result_without_graph_is_named():
    assert "no result requires grad" in failure(Call("cut", lambda x: swiglu(x.detach()), one))


def test_an_operation_that_did_not_run_is_named_with_those_that_did():
    said = failure(Call("swiglu", swiglu, one, operations=("npu_geglu",)))
    assert "npu_geglu did not run, but npu.npu_swiglu.default x1" in said


def test_arguments_that_the_schema_does_not_know_are_refused():
    with pytest.raises(RuntimeError, match="dimension"):
        run_call(Call("misspelt", lambda x: torch_npu.npu_swiglu(x, dimension=-1), one))


def test_all_calls_are_run_and_all_failures_told_together():
    good = Call("good", swiglu, one)
    bad = Call("bad", lambda x: swiglu(x.detach()), one)
    worse = Call("worse", lambda x: torch_npu.npu_no_such(x), one)
    assert set(run_calls([good])) == {"good"}
    with pytest.raises(AssertionError, match=r"(?s)2 call\(s\) failed.*bad: .*worse: AttributeError"):
        run_calls([bad, good, worse])


def rotated(npu, width):
    return torch_npu.npu_rotary_mul(*(npu.tensor(2, 1, 1, width) for _ in range(3)))


def test_every_call_is_held_to_the_shapes_of_its_contract():
    with fake_npu() as npu:
        rotated(npu, 64)
        with pytest.raises(KernelRefusal, match="npu_rotary_mul on Ascend 910B: the last dimension is below"):
            rotated(npu, 896)
        assert rotated(npu, 64).shape == (2, 1, 1, 64)
    with fake_npu(rules=False) as npu:
        assert rotated(npu, 896).shape == (2, 1, 1, 896)


def test_calls_of_the_same_shapes_dtypes_and_options_are_judged_once(monkeypatch):
    judged, check = [], Kernel.check
    monkeypatch.setattr(
        Kernel,
        "check",
        lambda kernel, *args, **options: judged.append(kernel) or check(kernel, *args, **options),
    )
    with fake_npu() as npu:
        for shape in ((2, 4), (2, 4), (4, 4)):
            swiglu(npu.tensor(*shape))
        swiglu(npu.tensor(2, 4, dtype=torch.float32))
        torch_npu.npu_swiglu(npu.tensor(2, 4), dim=0)
    assert len(judged) == 4


def test_rules_about_numbers_are_left_to_devices_that_have_them():
    with fake_npu() as npu:
        ends = npu.tensor(2, dtype=torch.int64)
        x, weight = npu.tensor(8, 16), npu.tensor(2, 16, 4)
        options = {"group_list": ends, "split_item": 3, "group_type": 0}
        assert torch_npu.npu_grouped_matmul([x], [weight], **options)[0].shape == (8, 4)
        with pytest.raises(KernelRefusal, match=r"x \[m, k\] and weight \[E, k, n\]"):
            torch_npu.npu_grouped_matmul([x], [npu.tensor(2, 8, 4)], **options)


def test_operations_are_counted_per_context():
    with fake_npu() as first:
        swiglu(first.tensor(2, 4))
    with fake_npu() as second:
        assert (first.count("npu_swiglu"), second.count("npu_swiglu")) == (1, 0)


def test_an_operator_that_is_only_handed_on_must_have_run():
    def mention(name, is_call=False):
        return ApiUse(Path("acme.py"), 1, 1, name, is_call)

    with fake_npu() as npu:
        swiglu(npu.tensor(2, 4))
    assert not never_ran(mention("torch_npu.npu_swiglu"))
    assert not never_ran(mention("torch.ops.npu.npu_swiglu.default"))
    assert never_ran(mention("torch_npu.npu_geglu"))
    assert not never_ran(mention("torch_npu.npu_geglu", is_call=True))
    assert not never_ran(mention("torch_npu.profiler.ProfilerLevel.Level0"))


def test_backward_runs_where_its_caller_is_seen():
    seen = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(threading.current_thread())
            return gradient

    run_call(Call("watched", Watched.apply, one))
    assert seen == [threading.current_thread()]
