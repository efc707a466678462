"""Linears of one rank without what training needs of them, while a model is only asked.

megatron-core's linears call functions of their own for the gradient of each product, which takes a fifth of
a token's time on a CPU. A linear that shares nothing with other ranks is the product alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.nn.functional import linear

from mindspeed_models.inference.instance_methods import methods_replaced


def plain_linears(chunk: torch.nn.Module) -> AbstractContextManager[None]:
    """Let megatron-core's own linears of a chunk compute the product alone until the block ends.

    Those of several ranks, of features, and those whose method somebody has changed stay as they are.
    """
    return methods_replaced(chunk, "forward", _function_of)


def _function_of(module: Any) -> Callable[..., Any] | None:
    function = {ColumnParallelLinear: _column, RowParallelLinear: _row}.get(type(module))
    # Experts exchange tokens around their linears, and leave sums to whoever did.
    if function is None or module.tp_group.size() > 1 or module.explicit_expert_comm:
        return None
    return function


def _column(
    module: Any, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
) -> tuple[Tensor, Tensor | None]:
    """Compute as ``ColumnParallelLinear.forward`` of one rank: ``[s, b, h]`` to ``[s, b, o]``, and bias."""
    bias = module.bias
    added, left = (None, bias) if module.skip_bias_add else (bias, None)
    return linear(input_, module.weight if weight is None else weight, added), left


def _row(module: Any, input_: Tensor) -> tuple[Tensor, Tensor | None]:
    """Compute as ``RowParallelLinear.forward`` of one rank: ``[s, b, h]`` to ``[s, b, o]``, and the bias."""
    output = linear(input_, module.weight)
    if module.skip_bias_add:
        return output, module.bias
    return (output if module.bias is None else output + module.bias), None
