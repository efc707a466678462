"""Sizes of a model that tensor parallelism cuts, from the arguments of any host; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a dense layer and of its micro-batch.

    Attributes:
        hidden: hidden size.
        width: of the feed-forward module.
        gated: its first linear has two halves.
        heads: query heads.
        groups: query groups, as many as heads without grouped queries.
        channels: of a head.
        positions: of the part of a sequence that a context-parallel rank has.
        batch: micro-batch size.
    """

    hidden: int
    width: int
    gated: bool
    heads: int
    groups: int
    channels: int
    positions: int
    batch: int

    @classmethod
    def of(cls, args: Any) -> ModelSizes:
        """Read the sizes."""
        heads, hidden = args.num_attention_heads, args.hidden_size
        groups = getattr(args, "num_query_groups", None)
        grouped = getattr(args, "group_query_attention", False)
        split = getattr(args, "context_parallel_size", 1) or 1
        return cls(
            hidden=hidden,
            width=getattr(args, "ffn_hidden_size", None) or 4 * hidden,
            gated=bool(getattr(args, "swiglu", False) or getattr(args, "quick_geglu", False)),
            heads=heads,
            groups=groups if grouped and groups else heads,
            channels=getattr(args, "kv_channels", None) or hidden // heads,
            positions=args.seq_length // split,
            batch=args.micro_batch_size,
        )
