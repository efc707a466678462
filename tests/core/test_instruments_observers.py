"""Observers change nothing of a step: functions are compiled under them, and count although unseen."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from mindspeed_megatron.instruments.allocation_history import AllocationHistory
from mindspeed_megatron.instruments.compiled_functions import run_eagerly_when_observed
from mindspeed_megatron.instruments.held_tensors import ACTIVATIONS
from mindspeed_megatron.instruments.memory import TensorBytes
from mindspeed_megatron.instruments.storage import StorageTracker
from mindspeed_megatron.instruments.work_counter import WorkCounter, count_compiled_attention


def compiled_under(mode):
    """Return whether torch compiles a function that is called under a mode."""
    graphs = []

    def note(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def function(x):
        return x.sin().cos()

    torch._dynamo.reset()
    with mode:
        torch.compile(function, backend=note)(torch.ones(3))
    return bool(graphs)


@pytest.mark.parametrize("make", [StorageTracker, WorkCounter, lambda: AllocationHistory(8)])
def test_functions_are_compiled_under_an_observer(make):
    assert compiled_under(make()) is not run_eagerly_when_observed()


def test_functions_run_eagerly_under_another_mode():
    """Why observers say what they are."""
    assert not compiled_under(TensorBytes())


class OutOfSight(torch.autograd.Function):
    """Doubles, as a compiled function does: no mode sees how."""

    @staticmethod
    def forward(ctx, x):
        with _disable_current_modes():
            return x * 2

    @staticmethod
    def backward(ctx, gradient):
        with _disable_current_modes():
            return gradient * 2


def passed(tracker):
    """Return what is alive of 256 bytes made out of sight and 256 made of them, and by kind at the peak."""
    with tracker:
        layer = torch.nn.Linear(8, 8, bias=False)
        hidden = OutOfSight.apply(torch.ones(8, 8, requires_grad=True))
        before = tracker.alive
        output = layer(hidden)
        alive = tracker.alive - before
        tracker.end_phase()
        del hidden, output
    return alive, tracker


def test_what_a_compiled_function_made_counts_from_its_first_use():
    alive, tracker = passed(StorageTracker(whole_graphs=True))
    assert alive == 512
    (phase,) = tracker.report()
    assert phase.kinds[ACTIVATIONS] == 512
    assert "a compiled function" in [tensor.operation for tensor in phase.largest]


def test_what_may_have_existed_before_does_not_count():
    assert passed(StorageTracker())[0] == 256


def test_what_a_compiled_function_made_is_given_back():
    tracker = StorageTracker(whole_graphs=True)
    with tracker:
        leaf = torch.ones(8, 8, requires_grad=True)
        before = tracker.alive
        OutOfSight.apply(leaf).sum().backward()
        assert tracker.alive - before == 256
        leaf.grad = None
        assert tracker.alive == before


def test_tensors_without_a_graph_are_none_of_a_compiled_function():
    batch = torch.ones(8, 8)
    with StorageTracker(whole_graphs=True) as tracker:
        batch.sum()
        assert not [size for size in tracker.now().values() if size > 4]


def test_compiled_attention_counts_forward_and_backward():
    q, k, v = (torch.randn(2, heads, 5, 8, requires_grad=True) for heads in (4, 2, 2))
    counter = WorkCounter()
    counter.key = "seen"
    with counter:
        context = (q.sum() + k.sum() + v.sum()) * torch.ones(2, 4, 5, 8)
        count_compiled_attention(context, q, k, v)
        forward = counter.work["seen"]["attention float32"]
        context.sum().backward()
    product = 2 * 2 * 4 * 5 * 5 * 8
    assert (forward, counter.work["seen"]["attention float32"]) == (2 * product, 7 * product)


def test_compiled_attention_counts_for_nobody_without_a_counter():
    q = torch.randn(1, 1, 2, 4, requires_grad=True)
    context = q * 2
    count_compiled_attention(context, q, q, q)
    assert context._backward_hooks is None
