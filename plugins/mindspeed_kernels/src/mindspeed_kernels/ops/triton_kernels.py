"""Registration of the Triton kernels of `mindspeed_kernels.device_kernels`, which is not imported here.

They are compiled at the first call of each kind, a second or less each, and kept on disk by Triton; none
tunes itself, so that no step of a training waits for a search. With ``TRITON_INTERPRET=1`` in the environment
Triton runs them on CPU tensors, which is how they are tested without a device.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from mindspeed_kernels.call import Call
from mindspeed_kernels.ops.availability import package_missing
from mindspeed_megatron.planned_kernels import kernels_for

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""True where kernels run on CPU tensors, as Triton reads it when it is imported."""
DEVICES = ("cuda", "cpu") if INTERPRETED else ("cuda",)
"""Types of devices whose tensors the kernels take."""
FLOATING = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes of the kernels, which compute in float32."""
PRIORITY = 20
"""Ahead of torch's kernels and compositions of them, as measured: ``benchmarks/results/gpu/kernels.json``."""


def triton_missing() -> str:
    """Return why Triton's kernels cannot run; empty when they can."""
    if kernels_for("cpu") != "cpu":
        # A dry run plans for a device elsewhere, whose torch brings Triton.
        return ""
    if not INTERPRETED and not torch.cuda.is_available():
        return "no CUDA device"
    return package_missing("triton")


def only_floating(*names: str) -> Callable[[Call], str]:
    """Return what tells why a call cannot be served: tensors of these names are not of `FLOATING`."""

    def refusal(call: Call) -> str:
        wrong = [dtype for name in names if (dtype := call.dtype(name)) not in FLOATING]
        return f"its kernels take float16, bfloat16 and float32, not {wrong[0]}" if wrong else ""

    return refusal


def planned(tensor: Tensor) -> bool:
    """Return whether a tensor has no memory, so that nothing is launched for it: in a dry run."""
    return isinstance(tensor, FakeTensor)


def rows_of(tensor: Tensor) -> Tensor:
    """Return ``[..., w]`` as ``[r, w]`` whose columns lie beside each other, copied where they do not."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()
