"""Checks of a call, and their messages."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch_npu

from mindspeed_testing.npu import ApiUse, Call, fake_npu, run_call, run_calls
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
