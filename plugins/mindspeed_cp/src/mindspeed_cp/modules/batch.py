"""A micro-batch split over ranks, and its description: which tokens are here, and what they see.

The description travels as megatron-core's ``packed_seq_params``, which reaches rotary embeddings and
attention on every pipeline stage, also through recomputation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mindspeed_core.errors import UserError
from mindspeed_cp.cut_lengths import length_problems
from mindspeed_cp.engine.documents import ends_by_length, restarted
from mindspeed_cp.engine.layout import Layout
from mindspeed_cp.engine.masks import MaskRule
from mindspeed_cp.engine.planners import layout_of
from mindspeed_cp.modules.rules import rules_of
from mindspeed_cp.options import cp_options

if TYPE_CHECKING:
    from mindspeed_core.run import Batch, Run


@dataclass
class SplitBatch(PackedSeqParams):
    """The description of a split micro-batch.

    Attributes:
        rules: what queries see, one rule for all samples or one for each.
        layout: which tokens every rank owns.
        stated: the rules say themselves whether queries see later keys; otherwise the layer does.
        positions: int64 ``[s / cp]``, global positions of this rank's tokens, on the device.
        seed: of attention dropout.
        first_sample: number of the first sample in the whole training.
    """

    rules: tuple[MaskRule, ...] = ()
    layout: Layout | None = None
    stated: bool = False
    positions: Tensor | None = None
    seed: int = 0
    first_sample: int = 0


def split_batch(run: Run, batch: Batch, microbatch: int) -> Batch:
    """Return this rank's part of a micro-batch, with its description.

    ``batch`` holds the whole sequences, or nothing on middle pipeline stages.

    Raises:
        UserError: the sequence cannot be cut so.
    """
    args = run.args
    grid = cp_options(args).grid
    rules, stated = rules_of(run, batch)
    if args.seq_length < 2 * grid.ranks:
        raise UserError(
            f"--seq-length {args.seq_length} cannot be split over {grid.ranks} ranks of context parallelism"
        )
    try:
        layout = layout_of(grid, rules)
    except ValueError as error:
        raise UserError(str(error)) from error
    wrong = length_problems(args, layout.lengths)
    if wrong:
        raise UserError("; ".join(wrong))
    positions = torch.from_numpy(layout.positions(run.pg.cp.rank())).to(run.dist.device)
    description = SplitBatch(
        qkv_format="sbhd",
        max_seqlen_q=args.seq_length,
        max_seqlen_kv=args.seq_length,
        rules=rules,
        stated=stated,
        layout=layout,
        positions=positions,
        seed=args.seed,
        first_sample=_first_sample(run, microbatch),
    )
    split: dict[str, Any] = {"packed_seq_params": description}
    for name in ("tokens", "labels", "loss_mask", "position_ids", "padding_mask"):
        whole = getattr(batch, name)
        if name == "position_ids" and batch.tokens is None:
            split[name] = None
        elif whole is not None:
            if name == "position_ids" and args.reset_position_ids and args.fix_sub_seq_length > 0:
                ends = ends_by_length(args.seq_length, args.fix_sub_seq_length)
                whole = restarted(args.seq_length, ends, whole).expand_as(whole)
            split[name] = whole.index_select(1, positions)
    return batch.with_(**split)


def _first_sample(run: Run, microbatch: int) -> int:
    """Return the number of a micro-batch's first sample in the whole training, the same for every layout."""
    size, dp = run.args.micro_batch_size, run.pg.dp
    return int(run.consumed_train_samples + (microbatch * dp.size() + dp.rank()) * size)
