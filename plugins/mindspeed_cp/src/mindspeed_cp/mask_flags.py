"""The flags of masks, documents and layouts, each with its check; no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mindspeed_core.feature import Flag, dest_of
from mindspeed_cp.algorithms import ADAPTIVE, FETCHING
from mindspeed_cp.checked_flag import CheckedFlag

if TYPE_CHECKING:
    from argparse import Namespace


def _document_length(args: Namespace) -> Iterator[str]:
    every = args.fix_sub_seq_length
    if every < 1 and every != -1:
        yield f"--fix-sub-seq-length is a number of tokens, or -1 for the documents of the data; got {every}"
    elif every != -1 and not args.reset_attention_mask:
        yield (
            f"--fix-sub-seq-length {every} makes documents, which --reset-attention-mask keeps apart; add it"
        )


DOCUMENT_FLAGS = (
    Flag("--reset-attention-mask", help="Tokens see their own document only, whose last token is its end."),
    Flag("--reset-position-ids", help="Positions begin again in every document."),
    Flag("--eod-mask-loss", help="No loss on the tokens that documents end with."),
    CheckedFlag(
        "--fix-sub-seq-length",
        type=int,
        default=-1,
        help="Documents of so many tokens each instead of those of the data; -1 leaves them.",
        check=_document_length,
    ),
)


def _variable_lengths(args: Namespace) -> Iterator[str]:
    dispatcher = getattr(args, "moe_token_dispatcher_type", None)
    if args.variable_seq_lengths and getattr(args, "num_experts", None) and dispatcher == "allgather":
        yield (
            "--variable-seq-lengths needs ranks of experts with different numbers of tokens; use "
            "--moe-token-dispatcher-type alltoall"
        )


def _adaptive(name: str, description: str, *, changes: bool = False) -> CheckedFlag:
    """Declare a switch that only the adaptive algorithms know."""

    def check(args: Namespace) -> Iterator[str]:
        algorithm = args.context_parallel_algo
        if getattr(args, dest_of(name)) and algorithm not in ADAPTIVE:
            yield f"{name} needs adaptive_cp_algo or hybrid_adaptive_cp_algo, got {algorithm}"

    return CheckedFlag(name, help=description, check=check, changes_training=changes)


MASK_FLAGS = (
    Flag(
        "--attention-mask-type",
        type=str,
        default="causal",
        choices=("causal", "general"),
        aliases=("--cp-attention-mask-type",),
        help="causal: parts of a sequence that balance a causal mask; general: consecutive parts, and "
        "masks that a script gives.",
    ),
    CheckedFlag(
        "--variable-seq-lengths",
        help="Ranks of a sequence may hold different numbers of tokens across pipeline stages.",
        check=_variable_lengths,
    ),
    Flag(
        "--attention-mask-on-cpu",
        help="Masks that a script gives may be larger than 2 GiB; they stay on the host.",
    ),
    _adaptive(
        "--adaptive-cp-only-reschedule",
        "Adaptive algorithms leave the order of tokens and deal out parts of it.",
    ),
    _adaptive(
        "--adaptive-cp-without-coarse",
        "Adaptive algorithms count the scores of a given mask, not its tiles of 128 x 128.",
    ),
    _adaptive(
        "--adaptive-cp-dynamic-attn-mask", "Adaptive algorithms ask for the mask of every micro-batch anew."
    ),
    _adaptive(
        "--adaptive-cp-manually-set-mask-list",
        "The mask of adaptive algorithms comes from a plugin that implements cp_mask_rule.",
        changes=True,
    ),
)


def _layout(args: Namespace) -> Iterator[str]:
    if args.cp_layout == "doc_zigzag" and not args.reset_attention_mask:
        yield (
            "--cp-layout doc_zigzag splits every document, which --reset-attention-mask keeps apart; add it, "
            "or use zigzag"
        )


def _chunks(args: Namespace) -> Iterator[str]:
    chunks, layout, algorithm = args.cp_chunks_per_rank, args.cp_layout, args.context_parallel_algo
    size, length = args.context_parallel_size, getattr(args, "seq_length", None)
    if chunks < 0:
        yield f"--cp-chunks-per-rank must not be negative, got {chunks}"
    if chunks and layout != "balanced" and not (layout == "auto" and algorithm in FETCHING):
        yield (
            f"--cp-chunks-per-rank {chunks} belongs to a balanced layout, got --cp-layout {layout} with "
            f"{algorithm}; add --cp-layout balanced"
        )
    if chunks > 0 and length and chunks * size > length:
        yield (
            f"--cp-chunks-per-rank {chunks} cuts --seq-length {length} into {chunks * size} chunks; use at "
            f"most {length // size}"
        )


LAYOUT_FLAGS = (
    CheckedFlag(
        "--cp-layout",
        type=str,
        default="auto",
        choices=("auto", "zigzag", "contiguous", "balanced", "doc_zigzag"),
        help="Which tokens a rank owns; auto suits the mask.",
        check=_layout,
    ),
    CheckedFlag(
        "--cp-chunks-per-rank",
        type=int,
        default=0,
        help="Chunks of each rank in a balanced layout; 0 takes the fewest that balance.",
        check=_chunks,
    ),
)
