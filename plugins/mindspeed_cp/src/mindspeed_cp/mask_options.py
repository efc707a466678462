"""What is wrong with flags about masks, documents and layouts, one sentence each; no torch."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_cp.options import ADAPTIVE_ALGO, GATHER_ALGO, HYBRID_ADAPTIVE_ALGO

ADAPTIVE = (ADAPTIVE_ALGO, HYBRID_ADAPTIVE_ALGO)
_ONLY_ADAPTIVE = (
    "adaptive_cp_only_reschedule",
    "adaptive_cp_without_coarse",
    "adaptive_cp_dynamic_attn_mask",
    "adaptive_cp_manually_set_mask_list",
)


def mask_problems(args: Namespace) -> list[str]:
    """Options without the algorithm, layout or documents that they belong to, and sizes that do not do."""
    return [*document_problems(args), *_adaptive_problems(args), *_layout_problems(args)]


def document_problems(args: Namespace) -> list[str]:
    """Documents of a given length that are not kept apart."""
    every = args.fix_sub_seq_length
    if every == -1:
        return []
    if every < 1:
        return [
            f"--fix-sub-seq-length is a number of tokens, or -1 for the documents of the data; got {every}"
        ]
    if not args.reset_attention_mask:
        return [
            f"--fix-sub-seq-length {every} makes documents, which --reset-attention-mask keeps apart; add it"
        ]
    return []


def _adaptive_problems(args: Namespace) -> list[str]:
    algorithm = args.context_parallel_algo
    if algorithm in ADAPTIVE:
        return []
    return [
        f"--{name.replace('_', '-')} needs adaptive_cp_algo or hybrid_adaptive_cp_algo, got {algorithm}"
        for name in _ONLY_ADAPTIVE
        if getattr(args, name)
    ]


def _layout_problems(args: Namespace) -> list[str]:
    size, layout, chunks = args.context_parallel_size, args.cp_layout, args.cp_chunks_per_rank
    algorithm, length = args.context_parallel_algo, getattr(args, "seq_length", None)
    found = []
    if length and length < 2 * size:
        found.append(
            f"--seq-length ({length}) is too short for --context-parallel-size ({size}); a rank holds "
            "at least 2 tokens"
        )
    dispatcher = getattr(args, "moe_token_dispatcher_type", None)
    if args.cp_variable_lengths and getattr(args, "num_experts", None) and dispatcher == "allgather":
        found.append(
            "--variable-seq-lengths needs ranks of experts with different numbers of tokens; use "
            "--moe-token-dispatcher-type alltoall"
        )
    if chunks < 0:
        found.append(f"--cp-chunks-per-rank must not be negative, got {chunks}")
    fetches = algorithm in (*ADAPTIVE, GATHER_ALGO)
    if chunks and layout != "balanced" and not (layout == "auto" and fetches):
        found.append(
            f"--cp-chunks-per-rank {chunks} belongs to a balanced layout, got --cp-layout {layout} with "
            f"{algorithm}; add --cp-layout balanced"
        )
    if chunks > 0 and length and chunks * size > length:
        found.append(
            f"--cp-chunks-per-rank {chunks} cuts --seq-length {length} into {chunks * size} chunks; use at "
            f"most {length // size}"
        )
    if layout == "doc_zigzag" and not args.reset_attention_mask:
        found.append(
            "--cp-layout doc_zigzag splits every document, which --reset-attention-mask keeps apart; add it, "
            "or use zigzag"
        )
    return found
