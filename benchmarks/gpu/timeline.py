"""The kernels of one step of a training: how long each kind of work takes, and how long the device waits."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

KINDS = {
    "attention": r"flash|fmha|sdpa|attention",
    "optimizer": r"multi_tensor|adam|lpnorm",
    "cross entropy": r"cross_entropy|softmax",
    "norm": r"rms_norm|layer_norm|rmsnorm|layernorm|gammabeta",
    "activation": r"swiglu|silu",
    "rotary": r"_rotary",
    "products": r"gemm|nvjet|cutlass|xmma|splitk|cublas|gemv|dot_kernel",
    "communication": r"nccl",
    "copies": r"memcpy|memset|copy|catarray|fill",
    "reductions": r"reduce",
    "elementwise": r"elementwise|triton_|vectorized|index|gather|scatter|embedding",
}
"""Kind of work: names of its kernels, the first that fits; anything else is ``others``."""
_LONGEST = 24


class Interval(NamedTuple):
    """A kernel on the device.

    Attributes:
        name: as the profiler has it.
        start: microseconds.
        end: microseconds.
    """

    name: str
    start: float
    end: float


class StepProfile:
    """Records what the device does between `start` and `stop`."""

    def __init__(self) -> None:
        """Record nothing yet."""
        self._profile: Any = None
        self.kernels: list[Interval] = []

    def start(self) -> None:
        """Begin; the device is idle."""
        cuda = torch.cuda.is_available()
        self._profile = profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU])
        self._profile.__enter__()

    def stop(self) -> None:
        """End, once the device is idle again."""
        if self._profile is None:
            return
        self._profile.__exit__(None, None, None)
        kind = torch.autograd.DeviceType.CUDA if torch.cuda.is_available() else torch.autograd.DeviceType.CPU
        self.kernels = [
            Interval(event.name, event.time_range.start, event.time_range.end)
            for event in self._profile.events()
            if event.device_type == kind
        ]
        self._profile = None


def kind_of(name: str) -> str:
    """Return the kind of work of a kernel."""
    return next((kind for kind, names in KINDS.items() if re.search(names, name, re.IGNORECASE)), "others")


def shares(kernels: Iterable[Interval], seconds: float) -> dict[str, Any]:
    """Return how a step is spent.

    Args:
        kernels: of the step.
        seconds: that it lasted.

    Returns:
        ``seconds`` by kind, ``gaps`` (seconds without any kernel) and ``share`` of the step by kind, and the
        kernels that took longest with their number and seconds.
    """
    found = sorted(kernels, key=lambda kernel: kernel.start)
    kinds: dict[str, float] = defaultdict(float)
    names: dict[str, list[float]] = defaultdict(list)
    for kernel in found:
        kinds[kind_of(kernel.name)] += (kernel.end - kernel.start) / 1e6
        names[kernel.name].append((kernel.end - kernel.start) / 1e6)
    gaps = max(0.0, seconds - busy(found))
    longest = sorted(names.items(), key=lambda item: -sum(item[1]))[:_LONGEST]
    spent = dict(sorted(kinds.items(), key=lambda item: -item[1])) | {"gaps": gaps}
    return {
        "step_seconds": seconds,
        "kernels": len(found),
        "seconds": spent,
        "share": {kind: value / seconds for kind, value in spent.items()} if seconds else {},
        "longest": [
            {"kernel": name[:120], "kind": kind_of(name), "times": len(each), "seconds": sum(each)}
            for name, each in longest
        ],
    }


def busy(kernels: Sequence[Interval]) -> float:
    """Return the seconds in which at least one of these kernels runs; they are in the order of starts."""
    total, reached = 0.0, float("-inf")
    for kernel in kernels:
        total += max(0.0, kernel.end - max(kernel.start, reached))
        reached = max(reached, kernel.end)
    return total / 1e6
