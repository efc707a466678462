"""Bytes that swapped layers need on the host, by formula, before anything is built; no torch.

They are those of the first pipeline rank, which keeps the most micro-batches, and never more than it will
need: what depends on modules that are not known here is left out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mindspeed_core.errors import UserError
from mindspeed_memory.recompute.interleaving import warmup_passes

_GIB = 2**30
_UNEVEN = (
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_num_transformer_layers",
    "num_layer_list",
    "noop_layers",
)
"""Arguments with which stages have other numbers of layers."""


class Need(NamedTuple):
    """Bytes that a rank keeps on the host at once.

    Attributes:
        layers: of a model chunk.
        passes: micro-batches through a chunk that are alive at once.
        each: bytes of a layer and micro-batch.
    """

    layers: int
    passes: int
    each: int

    @property
    def bytes(self) -> int:
        """Return all of them."""
        return self.layers * self.passes * self.each


def check_limit(flag: str, args: Any, need: Need | None) -> None:
    """Refuse a limit of the host that is too low.

    Args:
        flag: that swaps.
        args: validated.
        need: by formula; None where it is not known.

    Raises:
        UserError: the limit is below the need.
    """
    limit = args.swap_host_limit_gb
    if limit is None or need is None or need.bytes <= limit * _GIB:
        return
    raise UserError(
        f"--swap-host-limit-gb {limit:g}: {flag} keeps {need.bytes / _GIB:.3g} GiB on the host of the first "
        f"pipeline rank, {need.each / 2**20:.3g} MiB for each of {need.layers} layers and {need.passes} "
        "micro-batches; raise it, swap fewer layers, or use smaller micro-batches"
    )


def attention_need(args: Any) -> Need | None:
    """Return what swapped attention needs: query, key and value as one tensor, and the output."""
    if "self_attention" not in args.swap_modules or _given(args, "multi_latent_attention"):
        return None
    heads, hidden = args.num_attention_heads, args.hidden_size
    width = _given(args, "kv_channels") or hidden // heads
    groups = _given(args, "num_query_groups") if _given(args, "group_query_attention") else None
    groups = groups or heads
    tokens = _tokens(args) * _size(args) // args.tensor_model_parallel_size
    tensors = (tokens * (heads + 2 * groups) * width, tokens * heads * width)
    return _need(args, sum(each for each in tensors if each >= args.swap_min_bytes))


def input_need(args: Any) -> Need | None:
    """Return what swapped inputs of layers need."""
    if args.recompute_method != "block":
        return None
    split = args.tensor_model_parallel_size if args.sequence_parallel else 1
    each = _tokens(args) // split * args.hidden_size * _size(args)
    # A chunk behind another rank's has its first layer's input from there, and that one stays.
    chunks = _given(args, "virtual_pipeline_model_parallel_size") or 1
    return _need(args, each if each >= args.swap_min_bytes else 0, without=chunks > 1)


def _need(args: Any, each: int, *, without: bool = False) -> Need | None:
    microbatches = _given(args, "num_microbatches")
    if microbatches is None or any(_given(args, name) for name in _UNEVEN):
        return None
    ranks, chunks = (
        args.pipeline_model_parallel_size,
        _given(args, "virtual_pipeline_model_parallel_size") or 1,
    )
    group = _given(args, "microbatch_group_size_per_vp_stage") or ranks
    layers = args.num_layers // (ranks * chunks)
    if args.recompute_granularity == "full" and args.recompute_method == "block":
        if _given(args, "enable_recompute_layers_per_pp_rank"):
            return None
        layers = min(layers, args.recompute_num_layers or 0)
        last_too = layers == args.num_layers
    else:
        last_too = ranks == 1
    # The model's last layer is needed at once.
    layers -= last_too or without
    passes = min(ranks, microbatches)
    if chunks > 1:
        total = microbatches * chunks
        passes = min(warmup_passes(ranks, 0, chunks, group, total) + 1, total)
    return Need(max(layers, 0), passes, each)


def _tokens(args: Any) -> int:
    tokens: int = args.seq_length // args.context_parallel_size * args.micro_batch_size
    return tokens


def _size(args: Any) -> int:
    return 2 if args.bf16 or args.fp16 else 4


def _given(args: Any, name: str) -> Any:
    return getattr(args, name, None)
