"""``npu_ffn``: two matrix products with an activation between them, for one weight or for experts.

Rows of experts lie behind one another; ``expert_tokens`` counts them. With floating operands the definition
is differentiable, so that it can be trained with; the kernel for Ascend devices is for inference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_kernels.contract import HALF, Choice, ContractError, Dtype, Rank, SameDtype, SameSize
from mindspeed_kernels.ops.activations import GATED, PLAIN, activation_named
from mindspeed_kernels.ops.availability import kernel_of
from mindspeed_kernels.ops.gmm import grouped_matmul
from mindspeed_kernels.ops.operator import Make, Operator, Sample
from mindspeed_kernels.ops.quantization import decoded_scale, exact_product, widened_weight
from mindspeed_kernels.ops.row_groups import by_row, ends_of_groups
from mindspeed_kernels.ops.signatures import with_signature_of

_NAMES = (*PLAIN, *GATED)
Counts = Tensor | Sequence[int] | None


def npu_ffn_reference(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    activation: str,
    *,
    expert_tokens: Counts = None,
    expert_tokens_index: Counts = None,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    deq_scale1: Tensor | None = None,
    deq_scale2: Tensor | None = None,
    antiquant_scale1: Tensor | None = None,
    antiquant_scale2: Tensor | None = None,
    antiquant_offset1: Tensor | None = None,
    antiquant_offset2: Tensor | None = None,
    inner_precise: int | None = 0,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``activation(x · W1 + b1) · W2 + b2``.

    Args:
        x: ``[..., k1]``, floating, or int8 with ``deq_scale1`` and ``deq_scale2``.
        weight1: ``[k1, n1]``, or ``[E, k1, n1]`` for experts.
        weight2: ``[k2, n2]``, or ``[E, k2, n2]``; ``k2`` is ``n1``, or half of it for gated activations.
        activation: ``gelu``, ``fastgelu``, ``relu``, ``silu``; without experts ``geglu``, ``swiglu``,
            ``reglu``.
        expert_tokens: ``[E]`` number of rows of each expert.
        expert_tokens_index: ``[E]`` running ends instead.
        bias1: ``[n1]`` or ``[E, n1]``.
        bias2: ``[n2]`` or ``[E, n2]``.
        scale: quantizes the activation's result to int8: ``value * scale + offset``, rounded; ``[1]`` or
            ``[n1]``, for experts ``[E]`` or ``[E, n1]``.
        offset: ``[1]``, for experts ``[E]``; see ``scale``.
        deq_scale1: ``[n1]`` or ``[E, n1]``, scale of the first integer product.
        deq_scale2: ``[n2]`` or ``[E, n2]``, scale of the second.
        antiquant_scale1: ``[n1]`` or ``[E, n1]``, widens an int8 ``weight1``: ``(W + offset) * scale``.
        antiquant_scale2: the same for ``weight2``.
        antiquant_offset1: see ``antiquant_scale1``.
        antiquant_offset2: see ``antiquant_scale2``.
        inner_precise: 0 or None computes in float32; 1 in float16, for float16 on Ascend devices.
        output_dtype: of the result with int8 operands; float16 by default.

    Returns:
        ``[..., n2]``.
    """
    function = _activation(activation, weight1)
    rows = x.reshape(-1, x.shape[-1])
    ends = _ends(rows, weight1, expert_tokens, expert_tokens_index)
    if deq_scale1 is not None and deq_scale2 is not None:
        result = _quantized(
            rows, weight1, weight2, ends, function, bias1, bias2, scale, offset, deq_scale1, deq_scale2
        ).to(output_dtype or torch.float16)
    else:
        first = _widened(weight1, antiquant_scale1, antiquant_offset1, x.dtype)
        second = _widened(weight2, antiquant_scale2, antiquant_offset2, x.dtype)
        hidden = function(_product(rows, first, ends, bias1))
        result = _product(hidden.to(x.dtype), second, ends, bias2)
    return result.view(*x.shape[:-1], result.shape[-1])


def _activation(name: str, weight1: Tensor) -> Callable[[Tensor], Tensor]:
    if name.lower() in GATED and weight1.dim() == 3:
        raise ContractError(f"npu_ffn: activation {name} takes no experts; nearest supported: silu")
    return activation_named("npu_ffn", name, {**PLAIN, **GATED})


def _ends(rows: Tensor, weight1: Tensor, counts: Counts, index: Counts) -> Tensor | None:
    if weight1.dim() == 2:
        if counts is not None or index is not None:
            raise ContractError("npu_ffn: expert_tokens needs weights [E, k, n], got one weight")
        return None
    if (counts is None) == (index is None):
        raise ContractError("npu_ffn: with experts, give either expert_tokens or expert_tokens_index")
    given = index if counts is None else counts
    return ends_of_groups("npu_ffn", given, rows.shape[0], weight1.shape[0], counts=counts is not None)


def _by_row(table: Tensor, ends: Tensor | None, rows: int) -> Tensor:
    """Return a table ``[E, n]`` per row ``[m, n]``; ``[n]`` without experts."""
    if ends is None:
        return table
    return by_row(table, ends, rows)


def _quantizer(table: Tensor, ends: Tensor | None, rows: int) -> Tensor:
    """Return one number for all rows, one per column, or with experts a line of ``[E, 1 or n]`` per row."""
    if ends is None:
        return table.float()
    return by_row(table.float().view(ends.numel(), -1), ends, rows)


def _product(rows: Tensor, weight: Tensor, ends: Tensor | None, bias: Tensor | None) -> Tensor:
    result = rows @ weight if ends is None else grouped_matmul(rows, weight, ends)
    return result if bias is None else result + _by_row(bias, ends, rows.shape[0]).to(result.dtype)


def _widened(weight: Tensor, scale: Tensor | None, offset: Tensor | None, dtype: torch.dtype) -> Tensor:
    if scale is None:
        return weight
    return widened_weight(weight, scale, offset, 0, dtype)


def _quantized(
    rows: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    ends: Tensor | None,
    function: Callable[[Tensor], Tensor],
    bias1: Tensor | None,
    bias2: Tensor | None,
    scale: Tensor | None,
    offset: Tensor | None,
    deq_scale1: Tensor,
    deq_scale2: Tensor,
) -> Tensor:
    if scale is None:
        raise ContractError("npu_ffn: int8 operands need scale, which quantizes the activation's result")

    def product(values: Tensor, weight: Tensor, bias: Tensor | None, dequant: Tensor) -> Tensor:
        exact = (
            exact_product(values, weight)
            if ends is None
            else grouped_matmul(values.double(), weight.double(), ends)
        )
        if bias is not None:
            exact = exact + _by_row(bias, ends, rows.shape[0]).double()
        return (exact * _by_row(decoded_scale(dequant), ends, rows.shape[0]).double()).float()

    hidden = function(product(rows, weight1, bias1, deq_scale1)) * _quantizer(scale, ends, rows.shape[0])
    if offset is not None:
        hidden = hidden + _quantizer(offset, ends, rows.shape[0])
    narrow = hidden.round().clamp(-128, 127).to(torch.int8)
    return product(narrow, weight2, bias2, deq_scale2)


def _samples(make: Make) -> list[Sample]:
    return [
        Sample((make(2, 3, 8), make(8, 16), make(16, 8), "gelu"), {"bias1": make(16), "bias2": make(8)}),
        Sample((make(6, 8), make(8, 16), make(8, 8), "swiglu")),
        Sample((make(6, 8), make(2, 8, 16), make(2, 16, 8), "silu"), {"expert_tokens": [2, 4]}),
    ]


npu_ffn = Operator(
    "npu_ffn",
    npu_ffn_reference,
    contract=(
        Rank("x", 2, 8),
        Rank("weight1", 2, 3),
        Rank("weight2", 2, 3),
        Dtype("x", (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8)),
        SameDtype(("weight1", "weight2")),
        SameSize("weight1", -2, "x", -1),
        Choice("activation", _NAMES),
        Choice("inner_precise", (None, 0, 1)),
    ),
    saved="what autograd keeps of the two products and the activation",
    samples=_samples,
)


@npu_ffn.backend(
    "npu",
    ("npu",),
    available=kernel_of("910B", "910_93"),
    contract=(Dtype("x", (*HALF, torch.int8)),),
    differentiable=False,
)
@with_signature_of(npu_ffn_reference)
def _npu(
    *,
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    activation: str,
    expert_tokens: Counts,
    expert_tokens_index: Counts,
    inner_precise: int | None,
    **options: Any,
) -> Tensor:
    import torch_npu

    if not _kernel_computes(x, weight1, weight2, activation, inner_precise):
        return npu_ffn_reference(
            x,
            weight1,
            weight2,
            activation,
            expert_tokens=expert_tokens,
            expert_tokens_index=expert_tokens_index,
            **options,
        )

    def numbers(given: Counts) -> list[int] | None:
        return given.tolist() if isinstance(given, Tensor) else None if given is None else list(given)

    counts, index = numbers(expert_tokens), numbers(expert_tokens_index)
    if x.dtype == torch.bfloat16:
        # The kernel adds biases of bfloat16 operands in float32.
        for name in ("bias1", "bias2"):
            options[name] = None if options[name] is None else options[name].float()
    if options["scale"] is not None and options["offset"] is None:
        options["offset"] = torch.zeros(
            1 if counts is None and index is None else weight1.shape[0], device=x.device
        )
    result: Tensor = torch_npu.npu_ffn(
        x,
        weight1,
        weight2,
        activation.lower(),
        expert_tokens=counts,
        expert_tokens_index=index,
        inner_precise=0 if x.dtype == torch.bfloat16 else inner_precise or 0,
        **options,
    )
    return result


def _kernel_computes(
    x: Tensor, weight1: Tensor, weight2: Tensor, activation: str, inner_precise: int | None
) -> bool:
    """Return whether there is a kernel: rows end as wide as they began, gated ones in fast float16 only."""
    gated = activation.lower() in GATED
    return (
        x.shape[-1] == weight2.shape[-1]
        and x.numel() > 0
        and (not gated or (x.dtype == weight1.dtype == torch.float16 and inner_precise == 1))
    )
