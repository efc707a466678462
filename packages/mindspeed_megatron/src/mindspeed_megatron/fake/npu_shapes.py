"""Shape functions that torch_npu 2.13.0 lacks or has wrong, for operations that training meets.

Only dry runs need these; the operations themselves do without. A test in ``tests/npu_conformance`` shows each
fault, so that an entry leaves when a release has mended it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def add_layer_norm_backward(
    dy: Tensor | None, x1: Tensor, x2: Tensor, rstd: Tensor, mean: Tensor, gamma: Tensor, dsum: Tensor | None
) -> tuple[Tensor, ...]:
    """Add a shape function to ``npu_add_layer_norm_backward``: both summands, gamma, beta (float32)."""
    affine = torch.empty_like(gamma, dtype=torch.float32)
    return torch.empty_like(x1), torch.empty_like(x2), affine, torch.empty_like(affine)


def fusion_attention_v2(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, **options: Any
) -> tuple[Any, ...]:
    """Replace that of ``npu_fusion_attention_v2``: narrower values, packed statistics ``[t, n, 8]``."""
    layout = input_layout.upper()
    width = value.shape[-1]
    if layout in ("BSH", "SBH"):
        width = width * query.shape[-1] // key.shape[-1]
    batch, length = {"BSH": (0, 1), "BSND": (0, 1), "SBH": (1, 0), "BNSD": (0, 2), "TND": (0, 0)}[layout]
    rest = (head_num, 8) if layout == "TND" else (head_num, query.shape[length], 8)
    highest = query.new_empty((query.shape[batch], *rest), dtype=torch.float32)
    context = query.new_empty(*query.shape[:-1], width)
    return context, highest, torch.empty_like(highest), query.new_empty(0), 0, 0, 0


def fusion_attention_grad_v2(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, **options: Any
) -> tuple[Tensor | None, ...]:
    """Replace that of ``npu_fusion_attention_grad_v2``, which passes a list where a tensor belongs.

    Gradients of query, key, value, bias, both rotary parts, and sink; what was not given has no elements.
    """
    sizes = [options.get(name) for name in ("pse", "query_rope", "key_rope", "sink")]
    rest = [query.new_empty(0) if given is None else torch.empty_like(given) for given in sizes]
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), *rest


def format_cast(tensor: Tensor, acl_format: Any, *args: Any, **options: Any) -> Tensor:
    """Add a shape function to ``npu_format_cast``: the memory layout changes, the shape does not."""
    return torch.empty_like(tensor)


def record_stream(tensor: Tensor, stream: Any) -> None:
    """Replace ``record_stream``, which would ask the runtime: nothing is allocated on any stream."""
    return


SHAPES: Mapping[str, Callable[..., Any]] = {
    "aten.record_stream.default": record_stream,
    "npu.npu_add_layer_norm_backward.default": add_layer_norm_backward,
    "npu.npu_format_cast.default": format_cast,
    "npu.npu_fusion_attention_grad_v2.default": fusion_attention_grad_v2,
    "npu.npu_fusion_attention_v2.default": fusion_attention_v2,
}
"""By operation with overload."""
