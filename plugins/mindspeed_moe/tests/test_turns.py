"""Two passes that take turns: their order, their threads, and what happens when one of them fails."""

import threading

import pytest
import torch
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_moe.turns import Turns


class Passes:
    """A forward and a backward pass that note what they do, and wait after each step."""

    def __init__(self, forward_steps, backward_steps):
        self.turns, self.events, self.threads = Turns(), [], set()
        self.forward_steps, self.backward_steps = forward_steps, backward_steps

    def forward(self):
        for step in range(self.forward_steps):
            self.events.append(f"F{step}")
            self.turns.in_forward()
        return "output"

    def backward(self):
        self.threads.add(threading.get_ident())
        for step in range(self.backward_steps):
            self.events.append(f"B{step}")
            self.turns.in_backward()

    def run(self):
        return self.turns.run(self.forward, self.backward)


@pytest.mark.parametrize(
    ("forward", "backward", "order"),
    [
        (2, 2, "B0 F0 B1 F1"),
        (3, 1, "B0 F0 F1 F2"),
        (1, 3, "B0 F0 B1 B2"),
        (0, 2, "B0 B1"),
        (2, 0, "F0 F1"),
    ],
)
def test_passes_alternate_and_the_longer_one_goes_on_alone(forward, backward, order):
    passes = Passes(forward, backward)
    assert passes.run() == "output"
    assert " ".join(passes.events) == order
    assert threading.get_ident() not in passes.threads
    assert "backward" not in {thread.name for thread in threading.enumerate()}


def test_alone_nobody_is_waited_for():
    passes = Passes(2, 2)
    passes.forward()
    passes.backward()
    assert " ".join(passes.events) == "F0 F1 B0 B1"


def test_a_failing_forward_pass_ends_the_backward_pass_where_it_stands():
    passes = Passes(0, 3)

    def forward():
        raise ValueError("forward")

    with pytest.raises(ValueError, match="forward"):
        passes.turns.run(forward, passes.backward)
    assert passes.events == ["B0"]
    assert "backward" not in {thread.name for thread in threading.enumerate()}
    assert Passes(1, 1).run() == "output"


def test_a_failing_backward_pass_ends_the_forward_pass_with_its_error():
    passes = Passes(3, 0)

    def backward():
        passes.turns.in_backward()
        raise KeyError("backward")

    with pytest.raises(KeyError, match="backward"):
        passes.turns.run(passes.forward, backward)
    assert passes.events == ["F0"]


class Waits(Function):
    """Takes turns in backward."""

    @staticmethod
    def forward(ctx, x, turns, events):
        ctx.turns, ctx.events = turns, events
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.events.append("B")
        ctx.turns.in_backward()
        return gradient, None, None


def test_a_forward_pass_that_backward_computes_again_keeps_its_turn():
    turns, events = Turns(), []

    def layer(x):
        events.append("again" if threading.current_thread().name == "backward" else "once")
        turns.in_forward()
        return Waits.apply(x * x, turns, events)

    def computed(x):
        return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)

    x = torch.tensor(3.0, requires_grad=True)
    output = computed(x)
    again = torch.tensor(2.0, requires_grad=True)
    result = turns.run(lambda: computed(again), output.backward)
    # The layer that is computed again does not hand over before its own backward pass begins.
    assert events == ["once", "again", "B", "once"]
    assert x.grad == 6.0
    result.backward()
    assert again.grad == 4.0


class Seen(TorchDispatchMode):
    """Names the threads of the operations."""

    def __init__(self):
        super().__init__()
        self.threads = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.threads.add(threading.current_thread().name)
        return func(*args, **(kwargs or {}))


def test_who_observes_operations_sees_those_of_the_backward_pass():
    turns = Turns()
    output = torch.tensor(3.0, requires_grad=True) ** 2
    with Seen() as seen:
        turns.run(lambda: torch.ones(2) + 1, output.backward)
        torch.ones(1)
    assert seen.threads == {"MainThread", "backward"}
