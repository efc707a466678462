"""One call of a fused attention kernel: sizes, sequences, masks, biases and dropped weights.

Both versions of the kernel and both directions take the same arguments under two spellings. Here they are
read once, independent of the layout: heads ``[b, n, s, d]`` in float64, and the sequences that attend, each
a range of queries and a range of keys. Packed sequences (``TND``) appear as one sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mindspeed_testing.npu.kernels.contract import Arguments

LANES = 8
UNLIMITED = 2147483647
LOWEST = torch.finfo(torch.float32).min
LARGEST = torch.finfo(torch.float32).max
RANKS = {"SBH": 3, "BSH": 3, "TND": 3, "BNSD": 4, "BSND": 4}
_TO_HEADS = {"BSH": (0, 2, 1, 3), "SBH": (1, 2, 0, 3), "BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3)}
ALIBI_ROWS = 1024
TRIANGLE, PREFIX_ROWS = 2048, 3072


@dataclass(frozen=True)
class Sequence:
    """Queries that attend to keys.

    Attributes:
        sample: of the batch.
        index: among the packed sequences, 0 otherwise.
        rows: queries, from and to (exclusive).
        columns: keys, from and to.
        first_weight: place of the first weight ``[n, s1, s2]`` among all, for dropped ones.
    """

    sample: int
    index: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    first_weight: int

    @property
    def s1(self) -> int:
        """Return the number of queries."""
        return self.rows[1] - self.rows[0]

    @property
    def s2(self) -> int:
        """Return the number of keys."""
        return self.columns[1] - self.columns[0]


class AttentionCall:
    """The arguments of a call, whichever version and direction."""

    def __init__(self, arguments: Arguments) -> None:
        """Read them; nothing is checked."""
        self.a = arguments
        self.soc = arguments.soc
        self.layout: str = arguments["input_layout"].upper()
        self.heads: int = arguments["head_num"]
        self.mode: int = arguments["sparse_mode"]
        self.packed = self.layout == "TND"
        self.second = "pse_type" in arguments
        self.scale = float(arguments["scale_value"] if "scale_value" in arguments else arguments["scale"])
        spelled = "tokens" if self.second else "tockens"
        self.pre: int = arguments[f"pre_{spelled}"]
        self.following: int = arguments[f"next_{spelled}"]
        self.keep = float(arguments["keep_prob"])
        self.pse_type: int = arguments["pse_type"] if self.second else 1

    def get(self, name: str) -> Any:
        """Return an argument, None where this version does not have it."""
        return self.a.get(name)

    @property
    def mask(self) -> Tensor | None:
        """Return ``atten_mask``."""
        found: Tensor | None = self.a["atten_mask"]
        return found

    @cached_property
    def width(self) -> int:
        """Return the width of a head of queries and keys."""
        size = self.a["query"].shape[-1]
        return int(size // self.heads) if self.layout in ("BSH", "SBH") else int(size)

    @cached_property
    def groups(self) -> int:
        """Return the number of heads of keys."""
        key = self.a["key"]
        if self.layout in ("BSH", "SBH"):
            return int(key.shape[2] // self.width) if self.width else 0
        return int(key.shape[{"BNSD": 1, "BSND": 2, "TND": 1}[self.layout]])

    def of_heads(self, name: str, heads: int) -> Tensor:
        """Return an argument as ``[b, n, s, d]`` in float64."""
        tensor: Tensor = self.a[name].double()
        if self.packed:
            return tensor.transpose(0, 1).unsqueeze(0)
        if self.layout in ("BSH", "SBH"):
            tensor = tensor.unflatten(2, (heads, -1))
        return tensor.permute(_TO_HEADS[self.layout])

    def in_layout(self, heads: Tensor, dtype: torch.dtype) -> Tensor:
        """Return ``[b, n, s, d]`` in the layout of the call."""
        if self.packed:
            return heads.squeeze(0).transpose(0, 1).to(dtype).contiguous()
        order = [_TO_HEADS[self.layout].index(dimension) for dimension in range(4)]
        result = heads.permute(order)
        return (result.flatten(2) if self.layout in ("BSH", "SBH") else result).to(dtype).contiguous()

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        """Return batch, queries and keys; of packed sequences 1 and the number of tokens of both."""
        query, key = self.a["query"].shape, self.a["key"].shape
        batch, length = {"SBH": (1, 0), "BSH": (0, 1), "BSND": (0, 1), "BNSD": (0, 2), "TND": (0, 0)}[
            self.layout
        ]
        return (1 if self.packed else query[batch]), query[length], key[length]

    @cached_property
    def lengths(self) -> list[tuple[int, int]]:
        """Return queries and keys of each packed sequence; an end that does not grow is an empty one."""
        found, before = [], (0, 0)
        for ends in zip(self.a["actual_seq_qlen"], self.a["actual_seq_kvlen"]):
            found.append((max(0, ends[0] - before[0]), max(0, ends[1] - before[1])))
            before = ends
        return found

    @cached_property
    def sequences(self) -> list[Sequence]:
        """Return the sequences that attend."""
        batch, s1, s2 = self.sizes
        if not self.packed:
            step = self.heads * s1 * s2
            return [Sequence(sample, 0, (0, s1), (0, s2), sample * step) for sample in range(batch)]
        found, row, column, weight = [], 0, 0, 0
        for index, (queries, keys) in enumerate(self.lengths):
            rows, columns = (row, row + queries), (column, column + keys)
            found.append(Sequence(0, index, rows, columns, weight))
            row, column, weight = rows[1], columns[1], weight + self.heads * queries * keys
        return found

    @property
    def weights(self) -> int:
        """Return the number of attention weights."""
        return sum(self.heads * sequence.s1 * sequence.s2 for sequence in self.sequences)

    @property
    def numels(self) -> int:
        """Return the number that forward reports: differences of ends, also across trailing zeros."""
        if not self.packed:
            return self.weights
        total, before = 0, (0, 0)
        for ends in zip(self.a["actual_seq_qlen"], self.a["actual_seq_kvlen"]):
            total += (ends[0] - before[0]) * (ends[1] - before[1])
            before = ends
        return self.heads * total

    def mode_of(self, sequence: Sequence) -> int:
        """Return the mode of one sequence; modes 7 and 8 single out the last and the first with queries."""
        if self.mode not in (7, 8):
            return self.mode
        filled = [item.index for item in self.sequences if item.s1]
        special = (filled[-1] if self.mode == 7 else filled[0]) if filled else -1
        return 4 if sequence.index == special else {7: 3, 8: 2}[self.mode]

    def visible(self, sequence: Sequence) -> Tensor | None:
        """Return ``[1 | n, s1, s2]`` bool, True is visible; None when there is no mask: everything."""
        mask, mode = self.mask, self.mode_of(sequence)
        if mask is None:
            return None
        if mode in (0, 1, 5):
            if mask.dim() == 2:
                whole = self.packed and tuple(mask.shape) == self.sizes[1:]
                rows, columns = sequence.rows, sequence.columns
                if not whole:
                    rows, columns = (0, sequence.s1), (0, sequence.s2)
                return ~mask.bool()[None, slice(*rows), slice(*columns)]
            return ~mask.bool()[sequence.sample if mask.shape[0] > 1 else 0]
        offset = 0 if mode == 2 else sequence.s2 - sequence.s1
        step = torch.arange(sequence.s2)[None] - torch.arange(sequence.s1)[:, None] - offset
        if mode == 4:
            return ((step >= -self.pre) & (step <= self.following))[None]
        seen = step <= 0
        if mode == 6:
            seen = seen | (torch.arange(sequence.s2) < self.prefix_of(sequence))[None]
        return seen[None]

    def prefix_of(self, sequence: Sequence) -> int:
        """Return the leading keys that every query of a sequence sees."""
        return int(self.a["prefix"][sequence.index if self.packed else sequence.sample])

    def zero_rows(self, sequence: Sequence) -> bool:
        """Return whether rows without keys are zeroed: asked for, or found by the kernel's own reasoning."""
        if self.a["inner_precise"] == 2:
            return True
        s1, s2 = sequence.s1, sequence.s2
        if self.mask is None:
            return False
        if self.mode in (5, 6):
            return s1 > s2 and any(self.prefix_of(item) == 0 for item in self.sequences)
        if self.packed:
            return False
        pre, following = self.pre, self.following
        if self.mode == 3:
            pre, following = s1, s2 - s1
        elif self.mode == 4:
            pre, following = pre + s1 - s2, following + s2 - s1
        elif self.mode != 0 or (pre >= s1 and (following == 0 or following >= s2)):
            return False
        return pre < s1 - s2 or following < 0

    def biased(self, products: Tensor, sequence: Sequence) -> Tensor:
        """Return the scores ``[n, s1, s2]`` of products of queries and keys: scaled, with the bias."""
        pse = self.a["pse"]
        if pse is None:
            return products * self.scale
        if self.pse_type in (2, 3):
            sample = sequence.index if self.packed else sequence.sample
            slopes = (pse[sample] if pse.dim() == 2 else pse).double()
            step = torch.arange(sequence.s2)[None] - torch.arange(sequence.s1)[:, None] - self._start
            distance = step.abs().double()
            distance = distance.sqrt() if self.pse_type == 3 else distance
            return products * self.scale - slopes.view(-1, 1, 1) * distance
        bias = self._bias(pse.double(), sequence)
        return products * self.scale + bias if self.pse_type == 0 else (products + bias) * self.scale

    @property
    def _start(self) -> int:
        """Return how far the first query stands behind the first key; one index alone does not count."""
        query, key = self.a["q_start_idx"], self.a["kv_start_idx"]
        return int(query[0]) - int(key[0]) if query and key else 0

    def _bias(self, pse: Tensor, sequence: Sequence) -> Tensor:
        s1, s2 = sequence.s1, sequence.s2
        if self.packed and pse.dim() == 1:
            if pse.numel() == self.weights:
                first = sequence.first_weight
                return pse[first : first + self.heads * s1 * s2].view(self.heads, s1, s2)
            first = sequence.columns[0] * self.heads
            return pse[first : first + self.heads * s2].view(self.heads, 1, s2)
        sample = sequence.index if self.packed else sequence.sample
        pse = pse[sample if pse.shape[0] > 1 else 0]
        if pse.shape[1] == ALIBI_ROWS and (s1 > ALIBI_ROWS or self.packed):
            # Only the distance counts: the last row knows the bias of every one.
            distance = (torch.arange(s1)[:, None] - torch.arange(s2)[None]).clamp(min=0)
            return pse[:, -1][:, pse.shape[2] - 1 - distance]
        return pse

    def kept(self, sequence: Sequence, bits: Tensor | None) -> Tensor:
        """Return the factors ``[n, s1, s2]`` of weights: zero, or ``1 / keep_prob`` for those to keep."""
        shape = (self.heads, sequence.s1, sequence.s2)
        if bits is None:
            return torch.ones(shape, dtype=torch.float64)
        count = self.heads * sequence.s1 * sequence.s2
        place = torch.arange(sequence.first_weight, sequence.first_weight + count)
        bit = (bits.flatten()[place // 8].long() >> (place % 8)) & 1
        return bit.view(shape).double() / self.keep


def drawn_bits(seed: int, offset: int, numels: int, keep: float) -> Tensor:
    """Return the mask that a device draws, packed eight weights a byte, the lowest bit first.

    It is a function of seed, offset and number, like the device's; the bits themselves are not the device's.
    """
    generator = torch.Generator().manual_seed((seed * 1000003 + offset * 97 + numels) % (1 << 62))
    padded = -(-numels // 128) * 128
    kept = torch.rand(padded, generator=generator, dtype=torch.float64) < keep
    return packed_bits(kept)


def packed_bits(kept: Tensor) -> Tensor:
    """Return a mask of weights to keep, packed eight a byte, the lowest bit first, in multiples of 128."""
    flat = kept.flatten().to(torch.uint8)
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 128))
    return (flat.view(-1, 8) << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def each(rule: Callable[[AttentionCall], bool]) -> Callable[[Arguments], bool]:
    """Turn a rule about a call into one about its arguments."""
    return lambda arguments: rule(AttentionCall(arguments))
