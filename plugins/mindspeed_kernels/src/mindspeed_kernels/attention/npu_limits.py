"""The calls that the fused kernel of Ascend devices refuses, or would answer with wrong numbers.

They are what the kernel's tiling and its gradients ask for, and every call is judged. Both directions judge
alike, so that gradients are computed where the context was: dropped weights of one are unknown to the other.
"""

from __future__ import annotations

import logging
from functools import lru_cache

import torch

from mindspeed_kernels.attention.arguments import Inputs, Options
from mindspeed_kernels.attention.bias import COMPRESSED_ROWS
from mindspeed_kernels.attention.service import needs_second_version
from mindspeed_kernels.npu_builds import call_missing

logger = logging.getLogger("mindspeed_kernels.ops")

_LARGEST_WIDTH, _MOST_HEADS = 768, 256
_MOST_SEQUENCES, _MOST_PREFIXES = 1024, 32


def kernel_refusal(inputs: Inputs, options: Options) -> str:
    """Return why the kernel cannot compute an attention or its gradients; empty when it can."""
    query, key = inputs.query, inputs.key
    if options.dropout_mask is not None:
        return "its backward draws dropped weights again and takes no dropout_mask"
    if options.sink is not None and query.dtype == torch.float32:
        return "its backward takes a sink for float16 and bfloat16 only"
    if not (query.numel() and key.numel()):
        return "its backward refuses empty tensors"
    if query.shape[-1] > _LARGEST_WIDTH:
        return f"it knows heads up to {_LARGEST_WIDTH} wide, got {query.shape[-1]}"
    if options.head_num > _MOST_HEADS:
        return f"it knows up to {_MOST_HEADS} heads, got {options.head_num}"
    if options.sparse_mode in (5, 6) and query.shape[0] > _MOST_PREFIXES:
        return f"it knows up to {_MOST_PREFIXES} samples with a prefix, got {query.shape[0]}"
    build = _build_refusal(options)
    if build:
        return build
    bias = _bias_refusal(inputs, options)
    return bias or (_packed_refusal if options.layout == "TND" else _band_refusal)(inputs, options)


def _build_refusal(options: Options) -> str:
    """Return what the installed torch_npu lacks: packed statistics and sinks came with later builds."""
    wanted = ["sink"] if options.sink is not None else []
    second = needs_second_version(options)
    if options.layout == "TND" and not second:
        wanted.append("softmax_layout")
    if not wanted:
        return ""
    version = "_v2" if second else ""
    names = (f"npu_fusion_attention{version}", f"npu_fusion_attention_grad{version}")
    return next(filter(None, (call_missing(name, *wanted) for name in names)), "")


def _bias_refusal(inputs: Inputs, options: Options) -> str:
    pse, pieces = options.pse, inputs.attention.pieces
    if pse is None:
        return ""
    if options.pse_type in (2, 3):
        uneven = any(piece.visibility.sq != piece.visibility.sk for piece in pieces)
        return "it knows distances of as many queries as keys only" if uneven else ""
    if pse.requires_grad:
        return "its backward does not compute the gradient of pse"
    folded = options.layout != "TND" and pse.shape[2] == COMPRESSED_ROWS < inputs.query.shape[2]
    if folded and options.sparse_mode not in (2, 3):
        return "its backward knows the last rows of a bias in the sparse modes 2 and 3 only"
    return ""


def _band_refusal(inputs: Inputs, options: Options) -> str:
    if options.sparse_mode != 4:
        return ""
    seen = inputs.attention.pieces[0].visibility
    pre, following = options.pre_tokens - seen.offset, options.next_tokens + seen.offset
    beyond = (pre < 0 and -pre >= seen.sk) or (following < 0 and -following >= seen.sq)
    return "no query sees a key" if beyond or (pre < 0 and following < 0) else ""


def _packed_refusal(inputs: Inputs, options: Options) -> str:
    pieces, mode = inputs.attention.pieces, options.sparse_mode
    if len(pieces) > _MOST_SEQUENCES:
        return f"it knows up to {_MOST_SEQUENCES} packed sequences, got {len(pieces)}"
    filled = [piece for piece in pieces if piece.visibility.sq]
    if any(piece.visibility.may_see_nothing for piece in filled):
        return "it refuses packed sequences with a query that sees no key"
    if mode in (4, 7, 8) and (options.pre_tokens < 0 or options.pre_tokens + options.next_tokens <= 0):
        return "it refuses a band of one key in packed sequences"
    special = filled[-1:] if mode == 7 else filled[:1]
    if mode == 7 and options.next_tokens > 0:
        return "it refuses next_tokens above 0 in sparse_mode 7"
    if mode in (7, 8) and any(options.pre_tokens < piece.visibility.sk for piece in special):
        return (
            f"it refuses pre_tokens {options.pre_tokens} below the length of the keys in sparse_mode {mode}"
        )
    return ""


@lru_cache(maxsize=64)
def warn_of(reason: str) -> None:
    """Warn, once for a reason, that products compute attention instead of the kernel."""
    logger.warning("npu_fusion_attention on npu uses blocks; npu cannot: %s", reason)
