"""The results of blocks, each over other keys, joined into one attention; float32 throughout.

`Merger` is the definition. `FusedMerger` leaves the arithmetic to the update operator of mindspeed-kernels,
which is one kernel on Ascend devices.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

_LANES = 8
"""Copies of each number of a row that fused kernels for Ascend devices write."""
_LOWEST = torch.finfo(torch.float32).min

Rows = tuple[int, int]


class Merger:
    """Joins blocks.

    Attributes:
        output: ``[b, n, s, dv]``, at least float32; zeros for rows that saw nothing.
        logsum: ``[b, n, s]``, minus infinity for such rows.
    """

    output: Tensor
    logsum: Tensor

    def __init__(self, query: Tensor, value_width: int, sink: Tensor | None = None) -> None:
        """Start with rows that have seen nothing, or a score without value.

        Args:
            query: ``[b, n, s, d]``.
            value_width: width of values.
            sink: ``[n]``, a further score of every row, whose value is zero.
        """
        wide = torch.promote_types(query.dtype, torch.float32)
        self.output = query.new_zeros(*query.shape[:3], value_width, dtype=wide)
        self.logsum = query.new_full(query.shape[:3], float("-inf"), dtype=wide)
        if sink is not None:
            self.logsum.copy_(sink.view(-1, 1))

    def of_heads(self, heads: slice) -> Merger:
        """Return a view of some heads: what is added to it is added here."""
        part = copy.copy(self)
        part.output, part.logsum = self.output[:, heads], self.logsum[:, heads]
        return part

    def add(self, samples: slice, rows: Rows, output: Tensor, logsum: Tensor) -> None:
        """Join a block.

        Args:
            samples: which samples it is of.
            rows: which rows.
            output: ``[b, n, q, dv]``.
            logsum: ``[b, n, q]``, minus infinity for rows that saw nothing.
        """
        place = (samples, slice(None), slice(*rows))
        before = self.logsum[place]
        total = torch.logaddexp(before, logsum.to(before.dtype))
        weight = torch.exp(logsum.to(before.dtype) - total).nan_to_num_(0.0)
        block = self.output[place]
        # Interpolation leaves rows alone that saw nothing in this block.
        block.lerp_(output.to(block.dtype), weight.unsqueeze(-1))
        before.copy_(total)


class FusedMerger(Merger):
    """Joins blocks with the operator ``npu_ring_attention_update`` of mindspeed-kernels.

    It keeps what the operator works on: outputs ``[s, b, n * dv]``, and a maximum and a sum for every row.
    """

    def __init__(self, query: Tensor, value_width: int, sink: Tensor | None = None) -> None:
        """Start with rows that have seen nothing, or a score without value; see `Merger`.

        Raises:
            ValueError: queries are float64, which the operator does not join.
        """
        if query.dtype == torch.float64:
            raise ValueError("the fused update joins blocks in float32, queries are float64")
        batch, heads, length, _ = query.shape
        self._heads = heads
        self._joined = query.new_zeros(length, batch, heads * value_width, dtype=torch.float32)
        self._highest = query.new_full((batch, heads, length, _LANES), _LOWEST, dtype=torch.float32)
        self._total = torch.zeros_like(self._highest)
        self._touched: list[tuple[range, Rows]] = []
        if sink is not None:
            self._highest.copy_(sink.view(-1, 1, 1))
            self._total.fill_(1.0)
            self._touched.append((range(batch), (0, length)))

    def add(self, samples: slice, rows: Rows, output: Tensor, logsum: Tensor) -> None:
        """Join a block; see `Merger.add`."""
        which = range(*samples.indices(self._joined.shape[1]))
        current = output.permute(2, 0, 1, 3).flatten(2).float().contiguous()
        seen = logsum.isfinite()
        highest = torch.where(seen, logsum.float(), _LOWEST).unsqueeze(-1).expand(*logsum.shape, _LANES)
        total = seen.float().unsqueeze(-1).expand(*logsum.shape, _LANES)
        joined = self._joined[slice(*rows), samples]
        numbers = (samples, slice(None), slice(*rows))
        before = self._highest[numbers], self._total[numbers]
        if self._overlaps_earlier(which, rows):
            from mindspeed_kernels.ops.npu_ring_attention_update import npu_ring_attention_update

            current, highest, total = npu_ring_attention_update(
                joined.contiguous(),
                before[0].contiguous(),
                before[1].contiguous(),
                current,
                highest.contiguous(),
                total.contiguous(),
            )
        joined.copy_(current)
        before[0].copy_(highest)
        before[1].copy_(total)
        self._touched.append((which, rows))

    def _overlaps_earlier(self, samples: range, rows: Rows) -> bool:
        """Return whether some rows have seen a block: an update of nothing by nothing divides by zero."""
        return any(
            max(low, rows[0]) < min(high, rows[1]) and (set(samples) & set(others))
            for others, (low, high) in self._touched
        )

    @property
    def output(self) -> Tensor:  # type: ignore[override]
        """See `Merger`."""
        return self._joined.unflatten(-1, (self._heads, -1)).permute(1, 2, 0, 3)

    @property
    def logsum(self) -> Tensor:  # type: ignore[override]
        """See `Merger`."""
        return self._highest[..., 0] + self._total[..., 0].log()


def sink_gradient(sink: Tensor | None, output: Tensor, logsum: Tensor, outer: Tensor) -> Tensor | None:
    """Return the gradient ``[n]`` of the further scores; None where there are none.

    Args:
        sink: ``[n]``.
        output: ``[b, n, s, dv]``, of the whole attention.
        logsum: ``[b, n, s]``, the further score included.
        outer: ``[b, n, s, dv]``, gradient of the output.
    """
    if sink is None:
        return None
    weight = torch.exp(sink.to(logsum.dtype).view(-1, 1) - logsum)
    delta = (outer.to(logsum.dtype) * output.to(logsum.dtype)).sum(-1)
    return -(weight * delta).sum((0, 2)).to(sink.dtype)
