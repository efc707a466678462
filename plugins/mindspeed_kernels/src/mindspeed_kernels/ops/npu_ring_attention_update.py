"""Merging two partial attention results: the step of ring attention that joins another block of keys.

An attention over some of the keys is ``(output, max, sum)`` with ``max + log(sum)`` the log of the summed
exponentials; any split of that number into the two serves. Merging is associative and does not depend on
order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_kernels.contract import Choice, Dtype, Rank, SameShape
from mindspeed_kernels.ops.availability import kernel_of
from mindspeed_kernels.ops.operator import Make, Operator, Sample

_PACKED_WIDTHS, _WIDEST, _MOST_HEADS = 64, 768, 256
_TINY = torch.finfo(torch.float32).tiny


def npu_ring_attention_update_reference(
    prev_attn_out: Tensor,
    prev_softmax_max: Tensor,
    prev_softmax_sum: Tensor,
    cur_attn_out: Tensor,
    cur_softmax_max: Tensor,
    cur_softmax_sum: Tensor,
    actual_seq_qlen: Tensor | None = None,
    layout: str = "SBH",
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the attention over the keys of both blocks.

    Args:
        prev_attn_out: ``[s, b, n * d]`` (``SBH``) or ``[t, n, d]`` (``TND``).
        prev_softmax_max: float32 ``[b, n, s, 8]`` (``SBH``) or ``[t, n, 8]`` (``TND``), each value 8 times.
        prev_softmax_sum: like ``prev_softmax_max``.
        cur_attn_out: like ``prev_attn_out``.
        cur_softmax_max: like ``prev_softmax_max``.
        cur_softmax_sum: like ``prev_softmax_max``.
        actual_seq_qlen: running ends of the sequences with a leading 0, for ``TND``; device kernels need it.
        layout: ``SBH`` or ``TND``.

    Returns:
        Output, max and sum with the shapes and dtypes of the first three arguments. Rows that saw no key in
        either block have output 0, sum 0 and the smallest float32 as max.
    """
    highest = torch.maximum(prev_softmax_max, cur_softmax_max)
    before = prev_softmax_sum * torch.exp(prev_softmax_max - highest)
    now = cur_softmax_sum * torch.exp(cur_softmax_max - highest)
    total = before + now
    seen = total > 0
    divisor = torch.where(seen, total, 1.0)
    output = prev_attn_out.float() * _per_head(before / divisor, prev_attn_out, layout)
    output = output + cur_attn_out.float() * _per_head(now / divisor, prev_attn_out, layout)
    highest = torch.where(seen, highest, torch.finfo(torch.float32).min)
    return output.to(prev_attn_out.dtype), highest, total


def _per_head(scale: Tensor, output: Tensor, layout: str) -> Tensor:
    """Bring scales ``[b, n, s, 8]`` or ``[t, n, 8]`` to the shape of an output."""
    if layout.upper() == "TND":
        return scale[..., :1]
    batch, heads, length, _ = scale.shape
    by_row = scale[..., 0].permute(2, 0, 1).unsqueeze(-1)
    return by_row.expand(length, batch, heads, output.shape[-1] // heads).reshape(output.shape)


def _samples(make: Make) -> list[Sample]:
    def block(*shape: int) -> tuple[Tensor, Tensor]:
        return make(*shape, dtype=torch.float32).expand(*shape[:-1], 8), make(
            *shape, dtype=torch.float32
        ).exp().expand(*shape[:-1], 8)

    first, second = block(2, 3, 5, 1), block(2, 3, 5, 1)
    packed, more = block(7, 3, 1), block(7, 3, 1)
    return [
        Sample((make(5, 2, 12), *first, make(5, 2, 12), *second), backward=False),
        Sample(
            (make(7, 3, 4), *packed, make(7, 3, 4), *more, torch.tensor([0, 3, 7]), "TND"), backward=False
        ),
    ]


npu_ring_attention_update = Operator(
    "npu_ring_attention_update",
    npu_ring_attention_update_reference,
    contract=(
        Rank("prev_attn_out", 3, 3),
        SameShape("cur_attn_out", "prev_attn_out"),
        SameShape("cur_softmax_max", "prev_softmax_max"),
        SameShape("prev_softmax_sum", "prev_softmax_max"),
        SameShape("cur_softmax_sum", "prev_softmax_max"),
        *(
            Dtype(name, (torch.float32,))
            for name in ("prev_softmax_max", "prev_softmax_sum", "cur_softmax_max", "cur_softmax_sum")
        ),
        Choice("layout", ("SBH", "TND")),
    ),
    samples=_samples,
)


@npu_ring_attention_update.backend("lerp", ("cpu", "cuda", "npu"), differentiable=False)
def _lerp(
    prev_attn_out: Tensor,
    prev_softmax_max: Tensor,
    prev_softmax_sum: Tensor,
    cur_attn_out: Tensor,
    cur_softmax_max: Tensor,
    cur_softmax_sum: Tensor,
    actual_seq_qlen: Tensor | None = None,
    layout: str = "SBH",
) -> tuple[Tensor, Tensor, Tensor]:
    """Interpolate the outputs with one weight per row and head; nothing else is allocated."""
    packed = layout.upper() == "TND"
    highest = torch.maximum(prev_softmax_max[..., :1], cur_softmax_max[..., :1])
    before = prev_softmax_sum[..., :1] * torch.exp(prev_softmax_max[..., :1] - highest)
    now = cur_softmax_sum[..., :1] * torch.exp(cur_softmax_max[..., :1] - highest)
    total = before + now
    seen = total > 0
    weight = now / torch.where(seen, total, 1.0)
    if not packed:
        weight = weight.permute(2, 0, 1, 3)
    heads = weight.shape[-2]
    rows = prev_attn_out.shape
    shape = rows if packed else (*rows[:2], heads, rows[2] // heads)
    prev, cur = prev_attn_out.reshape(shape), cur_attn_out.reshape(shape)
    output = torch.lerp(prev.float(), cur.float(), weight).to(prev_attn_out.dtype)
    none = ~(seen.permute(2, 0, 1, 3) if not packed else seen)
    output = output.masked_fill_(none, 0.0).view(prev_attn_out.shape)
    highest = torch.where(seen, highest, torch.finfo(torch.float32).min)
    return output, highest.expand_as(prev_softmax_max), total.expand_as(prev_softmax_sum)


def _refusal(prev_attn_out: Tensor, layout: str) -> str:
    """Return why the kernel cannot join two outputs; empty when it can."""
    if not prev_attn_out.numel():
        return "it refuses empty tensors"
    if layout == "SBH":
        return ""
    heads, width = prev_attn_out.shape[1:]
    if width % _PACKED_WIDTHS or width > _WIDEST or heads > _MOST_HEADS:
        limits = f"a multiple of {_PACKED_WIDTHS} up to {_WIDEST}, and up to {_MOST_HEADS} of them"
        return f"packed heads are {width} wide and {heads}, it knows {limits}"
    return ""


_kernel_missing = kernel_of("910B", "910_93", "950", calls=("npu_ring_attention_update",))


@npu_ring_attention_update.backend(
    "npu", ("npu",), priority=10, available=_kernel_missing, differentiable=False
)
def _npu(
    prev_attn_out: Tensor,
    prev_softmax_max: Tensor,
    prev_softmax_sum: Tensor,
    cur_attn_out: Tensor,
    cur_softmax_max: Tensor,
    cur_softmax_sum: Tensor,
    actual_seq_qlen: Tensor | None = None,
    layout: str = "SBH",
) -> tuple[Tensor, Tensor, Tensor]:
    import torch_npu

    statistics = prev_softmax_max, prev_softmax_sum, cur_softmax_max, cur_softmax_sum
    layout = layout.upper()
    if _refusal(prev_attn_out, layout):
        outputs = prev_attn_out, *statistics[:2], cur_attn_out, *statistics[2:]
        return _lerp(*outputs, actual_seq_qlen, layout)
    ends = None
    if layout == "TND":
        whole = torch.tensor([0, prev_attn_out.shape[0]], device=prev_attn_out.device)
        ends = whole if actual_seq_qlen is None else actual_seq_qlen.to(torch.int64)
    # Rows that saw nothing in both blocks would be divided by zero.
    sums = [total.clamp_min(_TINY) for total in (prev_softmax_sum, cur_softmax_sum)]
    output, highest, total = torch_npu.npu_ring_attention_update(
        prev_attn_out,
        prev_softmax_max,
        sums[0],
        cur_attn_out.to(prev_attn_out.dtype),
        cur_softmax_max,
        sums[1],
        actual_seq_qlen=ends,
        input_layout=layout,
        input_softmax_layout="TND" if layout == "TND" else "",
    )
    return output, highest, total.masked_fill(highest <= torch.finfo(torch.float32).min, 0.0)
