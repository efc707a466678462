"""Uneven shards of a linear layer's weight; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_tp.model_sizes import ModelSizes
from mindspeed_tp.partition import Partition


@dataclass(frozen=True)
class Cut:
    """The dimension of a weight that ranks share, and the rows of the sequence that they hold.

    Attributes:
        parts: of the dimension, by rank.
        halves: 2 where the dimension is two equal ones behind each other that are cut alike (gated widths).
        sequence: of the sequence, by rank; None without sequence parallelism.
    """

    parts: Partition
    halves: int = 1
    sequence: Partition | None = None


@dataclass(frozen=True)
class Cuts:
    """The cuts of a model.

    Attributes:
        groups: of the query groups.
        width: of the feed-forward width.
        sequence: of the sequence; None without sequence parallelism.
        per_group: query heads of a group.
        channels: of a head.
        gated: the feed-forward module has two first linears in one.
        gates: a group has a gate of the output beside each query head.
    """

    groups: Partition
    width: Partition
    sequence: Partition | None
    per_group: int
    channels: int
    gated: bool
    gates: bool = False

    @classmethod
    def of(cls, args: Any) -> Cuts:
        """Read the cuts from arguments."""
        t, sizes = args.tensor_model_parallel_size, ModelSizes.of(args)
        cut_sequence = t > 1 and getattr(args, "sequence_parallel", False)
        return cls(
            groups=Partition.of(sizes.groups, t),
            width=Partition.of(sizes.width, t),
            sequence=Partition.of(args.seq_length, t) if cut_sequence else None,
            per_group=sizes.heads // sizes.groups,
            channels=sizes.channels,
            gated=sizes.gated,
            gates=bool(getattr(args, "attention_output_gate", False)),
        )

    def of_role(self, role: str) -> Cut:
        """Return the cut of the linear of a role: ``qkv``, ``proj``, ``fc1`` or ``fc2``."""
        of_group = self.per_group * (2 if self.gates else 1) + 2
        parts = {
            "qkv": self.groups.times(of_group * self.channels),
            "proj": self.groups.times(self.per_group * self.channels),
        }.get(role, self.width)
        return Cut(parts, 2 if role == "fc1" and self.gated else 1, self.sequence)

    @property
    def loads(self) -> Sequence[tuple[str, Partition]]:
        """Return what each partition is of, in words."""
        heads = "heads" if self.per_group == 1 else "query groups"
        found = [(heads, self.groups), ("of the feed-forward width", self.width)]
        return found if self.sequence is None else [*found, ("positions", self.sequence)]
