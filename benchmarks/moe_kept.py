"""Count bytes that routed experts keep for backward at DeepSeek-V3's shape, without computing anything."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from mindspeed_moe.weight_gradients import LaterGradient
from mindspeed_moe.zero_memory import Saving, experts_that_save

TOKENS, CHOICES, HIDDEN, WIDTH, EXPERTS = 4096, 8, 7168, 2048, 8
ROWS, MIB = TOKENS * CHOICES, 2**20
LEVELS = {"disable": 832, "level0": 256, "level1": 0}
"""MiB that experts keep, but for the probabilities of rows."""


def weighted_swiglu(inner, probs):
    gate, value = inner.chunk(2, dim=-1)
    return (F.silu(gate) * value * probs).to(inner.dtype)


def kept_bytes(level):
    storages = {}

    def keep(tensor):
        storages[id(tensor.untyped_storage())] = (tensor.untyped_storage(), tensor.untyped_storage().nbytes())
        return tensor

    with FakeTensorMode():
        first = torch.nn.Parameter(torch.empty(EXPERTS, HIDDEN, 2 * WIDTH, dtype=torch.bfloat16))
        second = torch.nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN, dtype=torch.bfloat16))
        rows = torch.empty(ROWS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        probs = torch.empty(ROWS, requires_grad=True)
        ends = torch.full((EXPERTS,), ROWS)
        experts = SimpleNamespace(
            activation_func_with_probs=weighted_swiglu, accumulates=False, weight1=first, weight2=second
        )
        later = LaterGradient(first), lambda: LaterGradient(second)
        saving = Saving(level, lambda with_probs: lambda: (rows.detach(), probs.detach()))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = experts_that_save(experts, (first, second), rows, probs, ends, later, saving)
        result.sum().backward()
        for gradient, tensor in ((rows.grad, rows), (probs.grad, probs), (first.grad, first)):
            assert gradient.shape == tensor.shape
        assert second.grad.shape == second.shape
    return sum(size for _, size in storages.values())
