"""``mindspeed-cp stats``: tokens, work and bytes of every rank with the flags of a training.

The same as ``mindspeed-features cp-stats``. Pure arithmetic: no torch, no devices, any number of ranks.
"""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import click

from mindspeed_core.terminal.training_flags import (
    UNPROCESSED_FLAGS,
    host_option,
    make_plan,
    platform_option,
    training_flags,
)

if TYPE_CHECKING:
    from mindspeed_cp.engine.masks import MaskRule
    from mindspeed_cp.engine.volume import Share, Sizes


@click.group()
def program() -> None:
    """Answer questions about context parallelism without a device."""


@program.command(
    "stats", short_help="Tokens, work and bytes of every rank.", context_settings=UNPROCESSED_FLAGS
)
@click.option("--documents", type=int, default=0, help="Assume packed documents of so many tokens each.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@host_option
@platform_option
@training_flags
def stats(documents: int, as_json: bool, host: str, platform: str | None, flags: tuple[str, ...]) -> None:
    """Say what every rank of context parallelism owns, computes and sends in one layer of attention.

    Scores are those of one query head and all samples of a micro-batch, bytes those of one rank of tensor
    parallelism.

    \b
    mindspeed-cp stats -- --num-attention-heads 32 --seq-length 131072 --context-parallel-size 8 ...
    """
    from mindspeed_core.registry import Registry

    args = make_plan(Registry.discover(), flags, host=host, platform=platform).args
    if args.context_parallel_size == 1:
        raise click.UsageError("--context-parallel-size is 1: nothing is split")
    found = shares(args, documents or max(0, args.fix_sub_seq_length))
    if as_json:
        click.echo(
            json.dumps([{**dataclasses.asdict(share), "sent": share.sent} for share in found], indent=2)
        )
        return
    from mindspeed_megatron.tables import print_table

    mean = sum(share.pairs for share in found) / len(found)
    rows = [_row(rank, share, mean) for rank, share in enumerate(found)]
    print_table(("rank", "tokens", "scores", "of mean", "kind", "MiB forward", "MiB backward"), rows)
    click.echo(f"largest work over the mean: {max(share.pairs for share in found) / max(1, mean):.3f}")
    click.echo(f"bytes of all ranks in one layer: {sum(share.sent for share in found):,}")


def shares(args: Namespace, documents: int = 0) -> list[Share]:
    """Return what every rank of context parallelism owns, computes and sends in one layer.

    ``documents`` are the tokens of every packed document; 0 stands for one document.
    """
    from mindspeed_cp.engine.volume import share_of
    from mindspeed_cp.options import cp_options

    options = cp_options(args)
    rules, sizes = (rule_of(args, documents),), sizes_of(args)
    return [share_of(options, rules, sizes, rank, options.kept(1)) for rank in range(options.grid.ranks)]


def rule_of(args: Namespace, documents: int) -> MaskRule:
    """Return the mask of the first layer, with documents of so many tokens each; 0 stands for one."""
    from mindspeed_cp.engine.masks import MaskRule

    length, window = args.seq_length, getattr(args, "window_size", None)
    ends = (*range(documents, length, documents), length) if documents else ()
    before = window[0] if window and window[0] >= 0 else None
    return MaskRule(length, args.attention_mask_type == "causal", ends, before)


def sizes_of(args: Namespace) -> Sizes:
    """Return the sizes of attention on one rank of tensor parallelism."""
    from mindspeed_cp.engine.volume import Sizes

    tp, heads = args.tensor_model_parallel_size, args.num_attention_heads
    key_heads = args.num_query_groups if args.group_query_attention else heads
    width = value_width = args.kv_channels or args.hidden_size // heads
    if getattr(args, "multi_latent_attention", False):
        width, value_width = args.qk_head_dim + args.qk_pos_emb_head_dim, args.v_head_dim
        key_heads = heads
    size = 2 if args.bf16 or args.fp16 else 4
    travelling = 4 if args.cp_grad_comm_dtype == "fp32" else size
    key_heads = max(1, key_heads // tp)
    return Sizes(args.micro_batch_size, heads // tp, key_heads, width, value_width, size, travelling)


def _row(rank: int, share: Share, mean: float) -> tuple[Any, ...]:
    kinds = sorted(share.forward.keys() | share.backward.keys())
    forward, backward = (
        " + ".join(f"{sent.get(kind, 0) / 2**20:,.2f}" for kind in kinds)
        for sent in (share.forward, share.backward)
    )
    work = share.pairs / max(1.0, mean)
    return rank, f"{share.tokens:,}", f"{share.pairs:,}", f"{work:.3f}", " + ".join(kinds), forward, backward
