"""The shortcut of a dry run counts, follows and answers what the modes do that it stands for."""

from contextlib import ExitStack, nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_megatron.fake.shortcut import Shortcut
from mindspeed_megatron.fake.tensors import AnsweringMode, ShapesOnly, shapes_only
from mindspeed_megatron.instruments.storage import StorageTracker
from mindspeed_megatron.instruments.work_counter import WorkCounter


class Looking(TorchDispatchMode):
    """Somebody else's mode."""

    def __init__(self):
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        return func(*args, **(kwargs or {}))


def train(steps=3):
    weight = torch.empty(16, 8, requires_grad=True)
    scale = torch.ones(16, requires_grad=True)
    for _ in range(steps):
        rows = torch.empty(4, 8)
        hidden = torch.nn.functional.gelu(rows @ weight.t()) * scale
        mask = torch.arange(16) < 5
        chosen = hidden.masked_fill(mask, 0.0).masked_select(mask).add_(1)
        first, second = chosen.split([8, 12])
        torch.cat([first, second]).sum().backward()
    return weight, scale


def run(shortcut, other=None):
    """Return the bytes, kinds of work and shapes of a small training."""
    shapes, answering = ShapesOnly(), AnsweringMode()
    storage, work = StorageTracker("cpu"), WorkCounter()
    with ExitStack() as stack:
        stack.enter_context(shapes_only(shapes, answering))
        stack.enter_context(storage)
        if shortcut == "both":
            stack.enter_context(Shortcut(shapes, answering, storage))
        stack.enter_context(other or nullcontext())
        stack.enter_context(work)
        if shortcut:
            stack.enter_context(Shortcut(shapes, answering, storage, work))
        work.key = "step"
        found = train()
        storage.end_phase()
        gradients = [tensor.grad.shape for tensor in found]
        [phase] = storage.report()
        return gradients, phase, storage.alive, storage.peak, work.work


def test_bytes_origins_and_work_are_the_same():
    assert run(True) == run("both") == run(False)


def test_another_mode_among_them_sees_every_operation():
    plain, passed_on = Looking(), Looking()
    assert run(True, passed_on) == run(False, plain)
    assert passed_on.operations == plain.operations > 0


@pytest.mark.parametrize("shortcut", [False, True])
def test_lengths_of_selections_by_known_masks_are_known(shortcut):
    gradients, *_ = run(shortcut)
    assert gradients == [(16, 8), (16,)]
