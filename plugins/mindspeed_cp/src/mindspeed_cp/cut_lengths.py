"""Checks of the numbers of tokens that ranks get; no torch."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from mindspeed_cp.engine.masks import MaskRule
from mindspeed_cp.engine.planners import layout_of
from mindspeed_cp.options import cp_options


def length_problems(args: Namespace, lengths: Sequence[int]) -> list[str]:
    """Return why ranks cannot hold so many tokens: sequence parallelism and pipelines want equal numbers."""
    tp = args.tensor_model_parallel_size if getattr(args, "sequence_parallel", False) else 1
    piped = args.pipeline_model_parallel_size > 1 and not args.variable_seq_lengths
    low, high = min(lengths), max(lengths)
    held = str(low) if low == high else f"{low} to {high}"
    shown = f"--seq-length {args.seq_length} gives the ranks of context parallelism {held} tokens"
    multiple = f"use a multiple of {2 * len(lengths) * tp}"
    found = []
    if any(length % tp for length in lengths):
        found.append(f"{shown}; --sequence-parallel over {tp} ranks needs multiples of {tp}: {multiple}")
    if piped and low != high:
        found.append(f"{shown}; pipelines hand on equal numbers: add --variable-seq-lengths, or {multiple}")
    return found


def cut_problems(args: Namespace) -> list[str]:
    """Return the same before there are batches, for a causal mask; other masks are checked batch by batch."""
    if not getattr(args, "seq_length", None) or args.context_parallel_size == 1:
        return []
    try:
        layout = layout_of(cp_options(args).grid, (MaskRule(args.seq_length),))
    except ValueError as error:
        return [str(error)]
    return length_problems(args, layout.lengths)
