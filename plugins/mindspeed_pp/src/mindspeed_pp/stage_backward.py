"""Backward pass of a stage with several inputs or outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_core.run import TensorSpec


def or_zeros(gradient: Tensor | None, tensor: Tensor) -> Tensor:
    """Return a gradient, zeros where there is none."""
    return torch.zeros_like(tensor) if gradient is None else gradient


def backward_of_several(
    received: list[Tensor | None],
    outputs: list[Tensor],
    gradients: list[Tensor | None],
    specs: Sequence[TensorSpec],
    config: Any,
) -> list[Tensor | None]:
    """Differentiate a stage with several inputs or outputs; megatron-core looks at the first output alone."""
    if gradients == [None]:
        loss = outputs[0] if config.grad_scale_func is None else config.grad_scale_func(outputs[0])
        torch.autograd.backward(loss)
    else:
        # A gradient travels for each tensor that is described so, also where this stage has none to compute.
        described = [output for output, spec in zip(outputs, specs) if spec.requires_grad]
        pairs = [(output, gradient) for output, gradient in zip(described, gradients) if output.requires_grad]
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
    return [None if tensor is None else tensor.grad for tensor in received]
