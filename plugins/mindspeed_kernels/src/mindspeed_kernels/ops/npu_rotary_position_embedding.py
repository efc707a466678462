"""Rotary position embedding (Su et al., 2021) of one tensor, in both pairings of dimensions.

Mode 0 pairs dimension ``i`` with ``i + d / 2``, mode 1 pairs ``2 i`` with ``2 i + 1``. Everything is computed
in float32 (float64 for float64) and rounded once. Backward keeps cosine and sine, and the input only where
they need gradients themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_kernels.call import Call, TensorFacts
from mindspeed_kernels.contract import NPU_FLOATING, Choice, ContractError, Divisible, Dtype, Holds, Rank
from mindspeed_kernels.ops.availability import kernel_of_training_devices
from mindspeed_kernels.ops.cached_rows import row_blocks, rows_at_a_time
from mindspeed_kernels.ops.compiled import add_compiled
from mindspeed_kernels.ops.operator import Make, Operator, Sample
from mindspeed_kernels.ops.triton_kernels import DEVICES, PRIORITY, only_floating, planned, triton_missing

_CACHED_ELEMENTS = 1 << 19
"""Elements of the input that a CPU rotates at a time."""
_TOO_WIDE = 896
"""The width from which on the kernel of NPUs refuses a head."""


def npu_rotary_position_embedding_reference(x: Tensor, cos: Tensor, sin: Tensor, mode: int = 0) -> Tensor:
    """Compute ``x * cos + rotate(x) * sin``.

    Args:
        x: 4 dimensions, ``d`` the last one, even, floating.
        cos: 4 dimensions that broadcast to ``x``, last one ``d``; any floating dtype.
        sin: like ``cos``.
        mode: 0: ``rotate([a | b]) = [-b | a]`` of halves; 1: the same of even and odd dimensions.

    Returns:
        Shape and dtype of ``x``.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    values = x.to(wide)
    return (values * cos.to(wide) + rotate(values, mode) * sin.to(wide)).to(x.dtype)


def rotate(x: Tensor, mode: int) -> Tensor:
    """Return ``[-b | a]`` of ``[a | b]``, in halves (mode 0) or in pairs (mode 1)."""
    first, second = _parts(x, mode)
    if mode == 0:
        return torch.cat((-second, first), dim=-1)
    return torch.stack((-second, first), dim=-1).flatten(-2)


def _parts(x: Tensor, mode: int) -> tuple[Tensor, Tensor]:
    if mode == 1:
        return x[..., ::2], x[..., 1::2]
    if mode:
        raise ContractError(f"npu_rotary_position_embedding: mode must be 0 or 1, got {mode}")
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, mode: int, backward: bool) -> Tensor:
    """Rotate block by block along the first dimension, forward or, transposed, backward."""
    wide = torch.promote_types(x.dtype, torch.float32)
    sign = -1 if not backward else 1
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    step = rows_at_a_time(x, _CACHED_ELEMENTS)
    # Converted rows use the same memory again and again.
    rooms = None if x.dtype == wide else x.new_empty(2, step, *x.shape[1:], dtype=wide)
    for block in row_blocks(x.shape[0], step):
        cosine, sine = _block(cos, block).to(wide), _block(sin, block).to(wide)
        sine_a, sine_b = _parts(sine, mode)
        if backward:
            sine_a, sine_b = sine_b, sine_a
        # Whole rows are converted and scaled at once; only the crossing products work on parts of them.
        values, out = x[block], result[block]
        if rooms is not None:
            count = values.shape[0]
            values, out = rooms[0, :count].copy_(values), rooms[1, :count]
        torch.mul(values, cosine, out=out)
        (a, b), (out_a, out_b) = _parts(values, mode), _parts(out, mode)
        out_a.addcmul_(b, sine_a, value=sign)
        out_b.addcmul_(a, sine_b, value=-sign)
        if rooms is not None:
            result[block].copy_(out)
    return result


def _block(table: Tensor, block: slice) -> Tensor:
    return table if table.shape[0] == 1 else table[block]


def _summed_to(gradient: Tensor, like: Tensor) -> Tensor:
    return gradient.sum_to_size(like.shape).to(like.dtype)


class RotaryFunction(torch.autograd.Function):
    """Keeps cosine and sine, and the input only where those need gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, mode: int) -> Tensor:
        """Rotate; see `npu_rotary_position_embedding_reference`."""
        return _forward(ctx, x, cos, sin, mode, _rotated)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Rotate the gradient back."""
        return _gradients(ctx, gradients[0], _rotated)


def _forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, mode: int, turn: Callable[..., Tensor]) -> Tensor:
    kept = x if cos.requires_grad or sin.requires_grad else None
    ctx.save_for_backward(kept, cos, sin)
    ctx.mode = mode
    return turn(x, cos, sin, mode, backward=False)


def _gradients(ctx: Any, gradient: Tensor, turn: Callable[..., Tensor]) -> tuple[Tensor | None, ...]:
    """Return the gradients of input, cosine and sine; ``turn`` rotates."""
    x, cos, sin = ctx.saved_tensors
    to_x = to_cos = to_sin = None
    if ctx.needs_input_grad[0]:
        to_x = turn(gradient, cos, sin, ctx.mode, backward=True)
    if ctx.needs_input_grad[1]:
        to_cos = _summed_to(gradient * x, cos)
    if ctx.needs_input_grad[2]:
        to_sin = _summed_to(gradient * rotate(x, ctx.mode), sin)
    return to_x, to_cos, to_sin, None


class TritonRotaryFunction(RotaryFunction):
    """The same, read and written once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, mode: int) -> Tensor:
        """Rotate; see `npu_rotary_position_embedding_reference`."""
        return _forward(ctx, x, cos, sin, mode, _rotated_at_once)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Rotate the gradient back."""
        return _gradients(ctx, gradients[0], _rotated_at_once)


def _rotated_at_once(x: Tensor, cos: Tensor, sin: Tensor, mode: int, backward: bool) -> Tensor:
    if planned(x):
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    from mindspeed_kernels.device_kernels.rotary import rotate_at_once

    operands = _with_columns(x), _with_columns(cos), _with_columns(sin)
    return rotate_at_once(*operands, mode, backward=backward)


def _with_columns(tensor: Tensor) -> Tensor:
    """Copy a tensor whose last dimension does not lie in one piece."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _broadcasts(name: str) -> Holds:
    def judge(call: Call) -> tuple[Any, Any] | None:
        table, x = call[name], call["x"]
        if not isinstance(table, TensorFacts) or table.shape is None or x.shape is None:
            return None
        leading = zip(table.shape[:-1], x.shape[:-1], strict=False)
        fits = all(size in (1, full) for size, full in leading) and table.shape[-1] == x.shape[-1]
        if fits and len(table.shape) == len(x.shape):
            return None
        return table.shape, (*(1 for _ in x.shape[:-1]), x.shape[-1])

    return Holds(name, "must have the sizes of x, or 1 in any dimension but the last", judge)


def _key(x: Tensor, cos: Tensor, sin: Tensor, mode: int = 0) -> tuple[Any, ...]:
    # The kernel of NPUs rotates some widths only, and an odd one would be rotated wrongly without an error.
    width = x.shape[-1] if x.ndim else 0
    tables = cos.dtype, cos.ndim, sin.dtype, sin.ndim
    return x.device, x.dtype, x.ndim, width < _TOO_WIDE, width % 2, tables, mode


def _samples(make: Make) -> list[Sample]:
    angles = make(7, 1, 1, 8)
    return [Sample((make(7, 2, 3, 8), angles.cos(), angles.sin(), mode)) for mode in (0, 1)] + [
        Sample((make(7, 2, 3, 8), angles[:1].cos(), angles[:1].sin()))
    ]


npu_rotary_position_embedding = Operator(
    "npu_rotary_position_embedding",
    npu_rotary_position_embedding_reference,
    contract=(
        Rank("x", 4, 4),
        Rank("cos", 4, 4),
        Rank("sin", 4, 4),
        Dtype("x"),
        Dtype("cos"),
        Dtype("sin"),
        Divisible("x", -1, 2),
        _broadcasts("cos"),
        _broadcasts("sin"),
        Choice("mode", (0, 1)),
    ),
    key=_key,
    saved="cosine and sine; the input where those need gradients",
    samples=_samples,
)


@npu_rotary_position_embedding.backend("blocks", ("cpu",))
def _cpu(x: Tensor, cos: Tensor, sin: Tensor, mode: int = 0) -> Tensor:
    if torch.compiler.is_compiling():
        return npu_rotary_position_embedding_reference(x, cos, sin, mode)
    result: Tensor = RotaryFunction.apply(x, cos, sin, mode)
    return result


@npu_rotary_position_embedding.backend(
    "triton", DEVICES, priority=PRIORITY, available=triton_missing, supports=only_floating("x", "cos", "sin")
)
def _triton(x: Tensor, cos: Tensor, sin: Tensor, mode: int = 0) -> Tensor:
    if torch.compiler.is_compiling():
        return npu_rotary_position_embedding_reference(x, cos, sin, mode)
    result: Tensor = TritonRotaryFunction.apply(x, cos, sin, mode)
    return result


def _in_kernel_range(call: Call) -> tuple[Any, Any] | None:
    x = call["x"]
    if x.shape is None or x.shape[-1] < _TOO_WIDE:
        return None
    return x.shape[-1], _TOO_WIDE - 2


@npu_rotary_position_embedding.backend(
    "npu",
    ("npu",),
    available=kernel_of_training_devices,
    contract=(
        Dtype("x", NPU_FLOATING),
        Holds("x", f"last dimension must be below {_TOO_WIDE}", _in_kernel_range),
    ),
)
def _npu(x: Tensor, cos: Tensor, sin: Tensor, mode: int = 0) -> Tensor:
    import torch_npu

    rows, tables = _for_kernel(x, (cos.to(x.dtype), sin.to(x.dtype)), mode)
    result: Tensor = torch_npu.npu_rotary_mul(rows, *tables, rotary_mode="interleave" if mode else "half")
    return result.view(x.shape)


def _for_kernel(x: Tensor, tables: tuple[Tensor, Tensor], mode: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return a view of ``x``, and cosine and sine of shapes that the kernel takes for it.

    Angles vary along one dimension, in mode 0 also along two of which one is the first, or along all.
    """
    a, b, c, width = x.shape
    leading = torch.broadcast_shapes(*(table.shape[:3] for table in tables))
    cos, sin = (table.expand(*leading, width) for table in tables)
    shared = ((1, 1, c), (1, b, 1), (a, 1, 1))
    if leading in shared or (mode == 0 and leading in ((a, 1, c), (a, b, 1), (a, b, c))):
        return x, (cos, sin)
    if leading == (1, 1, 1):
        return x, (cos.expand(a, 1, 1, -1), sin.expand(a, 1, 1, -1))
    if mode == 0:
        return x, (cos.expand(a, b, c, -1), sin.expand(a, b, c, -1))
    if leading == (a, b, 1):
        # Samples with angles of their own are so many more positions.
        return x.reshape(-1, 1, c, width), (cos.reshape(-1, 1, 1, width), sin.reshape(-1, 1, 1, width))
    cos, sin = (table.expand(a, b, c, -1).reshape(-1, 1, 1, width) for table in (cos, sin))
    return x.reshape(-1, 1, 1, width), (cos, sin)


add_compiled(npu_rotary_position_embedding)
