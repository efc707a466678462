"""The activation functions that operators take by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from mindspeed_kernels.contract import ContractError


def fast_gelu(x: Tensor) -> Tensor:
    """Compute ``x * sigmoid(1.702 x)``."""
    return x * torch.sigmoid(1.702 * x)


def gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Compute ``activation(a) * b`` of ``[a | b]`` along the last dimension."""

    def call(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return activation(first) * second

    return call


PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "fastgelu": fast_gelu,
    "relu": F.relu,
    "silu": F.silu,
}
GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "geglu": gated(F.gelu),
    "swiglu": gated(F.silu),
    "reglu": gated(F.relu),
}


NUMBERED: dict[int, Callable[[Tensor], Tensor]] = {
    0: lambda x: x,
    1: F.relu,
    2: lambda x: F.gelu(x, approximate="tanh"),
    4: fast_gelu,
    5: F.silu,
}
"""By the number that quantized products take; 3, the exact gelu, has no kernel on the devices that use it."""


def activation_named(
    operator: str, name: str, functions: dict[str, Callable[[Tensor], Tensor]]
) -> Callable[[Tensor], Tensor]:
    """Return the activation of a name, whatever its case.

    Raises:
        ContractError: there is none; the message lists the choices.
    """
    found = functions.get(name.lower())
    if found is None:
        raise ContractError(f"{operator}: activation must be one of {', '.join(functions)}, got {name!r}")
    return found
