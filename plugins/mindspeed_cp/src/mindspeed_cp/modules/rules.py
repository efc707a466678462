"""Mask rules of a micro-batch: from documents, from a mask that was given, or by another package."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mindspeed_core.errors import UserError
from mindspeed_cp.engine.documents import ends_by_length, ends_by_position, ends_by_token
from mindspeed_cp.engine.masks import MaskRule
from mindspeed_cp.given_mask import given_mask

if TYPE_CHECKING:
    from torch import Tensor

    from mindspeed_core.run import Batch, Run
    from mindspeed_core.session import Session
    from mindspeed_cp.engine.masks import MaskRule


@dataclass
class CPState:
    """The record of a session, see `mindspeed_core.session.Session.state`.

    Attributes:
        plugin_rules: the first answer of a plugin to ``cp_mask_rule``, where it stays for the run.
        matrix_rule: the mask that a script gave, its version, and the rule made of it.
    """

    plugin_rules: tuple[MaskRule, ...] | None = None
    matrix_rule: tuple[Tensor, int, MaskRule] | None = None


STAGE = "cp_mask_rule"
_MOST_BYTES = 2**31


def fields_for_rules(session: Session, args: Namespace) -> frozenset[str]:
    """Return the fields of a batch that rules are made from, on every pipeline stage."""
    if session.implementations(STAGE):
        return frozenset({"tokens", "position_ids"})
    if not args.reset_attention_mask or args.fix_sub_seq_length > 0:
        return frozenset()
    return frozenset({"position_ids" if args.reset_position_ids else "tokens"})


def check_answered(session: Session) -> None:
    """Refuse a mask by plugin without a plugin.

    Raises:
        UserError: nobody implements the stage.
    """
    if not session.implementations(STAGE):
        raise UserError(
            f"--adaptive-cp-manually-set-mask-list needs a plugin that implements {STAGE}: a feature with a "
            "hook of this name, which returns a mindspeed_cp.engine.masks.MaskRule"
        )


def rules_of(run: Run, batch: Batch) -> tuple[tuple[MaskRule, ...], bool]:
    """Return the rules of a micro-batch, and whether they say themselves if queries see later keys.

    ``batch`` holds the whole sequences, with the fields of `fields_for_rules`.

    Returns:
        One rule for all samples or one for each. Where the second is False, the layer says whether it is
        causal.

    Raises:
        UserError: what was given cannot be used.
    """
    args, session = run.args, run.session
    if args.adaptive_cp_manually_set_mask_list:
        check_answered(session)
    if session.implementations(STAGE):
        return _from_plugin(run, batch), True
    mask = given_mask()
    if mask is not None:
        return (_from_matrix(session, args, mask),), True
    return _from_documents(run, batch), False


def _from_plugin(run: Run, batch: Batch) -> tuple[MaskRule, ...]:
    """Return the rules of the package that implements the stage."""
    args, session = run.args, run.session
    state = session.state(CPState)
    stays = args.adaptive_cp_manually_set_mask_list and not args.adaptive_cp_dynamic_attn_mask
    if stays and state.plugin_rules is not None:
        return state.plugin_rules
    found = session.call(STAGE, run=run, batch=batch)
    rules = (found,) if isinstance(found, MaskRule) else tuple(found)
    who = f"{STAGE} of {', '.join(session.implementations(STAGE))}"
    if not all(isinstance(rule, MaskRule) for rule in rules) or len(rules) not in (1, args.micro_batch_size):
        raise UserError(
            f"{who} answers one MaskRule, or one for each of {args.micro_batch_size} samples; got {found!r}"
        )
    lengths = {rule.length for rule in rules}
    if lengths != {args.seq_length}:
        raise UserError(
            f"{who} answers with rules of {sorted(lengths)} positions where --seq-length is {args.seq_length}"
        )
    if stays:
        state.plugin_rules = rules
    return rules[:1] if len(set(rules)) == 1 else rules


def _from_matrix(session: Session, args: Namespace, mask: Tensor) -> MaskRule:
    """Return the rule of a mask that a script gave; made once, and again where the mask changed."""
    state = session.state(CPState)
    if state.matrix_rule is not None and not args.adaptive_cp_dynamic_attn_mask:
        before, version, rule = state.matrix_rule
        if before is mask and version == mask._version:
            return rule
    _check_matrix(args, mask)
    rule = MaskRule(args.seq_length, causal=False, matrix=(~mask).cpu().numpy())
    state.matrix_rule = mask, mask._version, rule
    return rule


def _check_matrix(args: Namespace, mask: Tensor) -> None:
    length = args.seq_length
    if args.attention_mask_type == "causal":
        raise UserError("a user mask needs --attention-mask-type general")
    if mask.dim() != 2 or mask.shape[0] != mask.shape[1]:
        raise UserError(
            f"only 2-dimensional masks of self attention are split over ranks, got {tuple(mask.shape)}"
        )
    if mask.dtype != torch.bool or len(mask) != length:
        raise UserError(
            f"a mask of --seq-length {length} is bool [{length}, {length}], got {mask.dtype} "
            f"{tuple(mask.shape)}"
        )
    if length * length > _MOST_BYTES and not args.attention_mask_on_cpu:
        raise UserError(
            f"a mask of {length} x {length} takes {length * length / 2**30:.1f} GiB; "
            "--attention-mask-on-cpu keeps it on the host, a rule (cp_mask_rule) needs no matrix"
        )


def _from_documents(run: Run, batch: Batch) -> tuple[MaskRule, ...]:
    """Return rules that keep documents apart where that was asked for; otherwise of one sequence."""
    args = run.args
    length = args.seq_length
    if not args.reset_attention_mask:
        return (MaskRule(length),)
    if args.fix_sub_seq_length > 0:
        return (MaskRule(length, ends=ends_by_length(length, args.fix_sub_seq_length)),)
    if args.reset_position_ids:
        found = ends_by_position(_required(batch.position_ids, "position_ids"))
    else:
        found = ends_by_token(_required(batch.tokens, "tokens"), end_of_document(run))
    rules = tuple(MaskRule(length, ends=ends) for ends in found)
    return rules[:1] if len(set(rules)) == 1 else rules


def _required(field: Tensor | None, name: str) -> Tensor:
    if field is None:
        raise UserError(
            f"--reset-attention-mask finds documents in {name}, which the batch of this pipeline stage "
            "lacks; batch_fields asks for them on every stage"
        )
    return field


def end_of_document(run: Run) -> int:
    """Return the token that documents end with: that of the tokenizer which the dataset was made with.

    Raises:
        UserError: there is no dataset with a tokenizer, or it overwrites these tokens.
    """
    way_out = "add --reset-position-ids, which marks documents by positions"
    tokenizer = run.tokenizer or _tokenizer(run.datasets)
    if tokenizer is None:
        raise UserError(
            "--reset-attention-mask finds documents by the token they end with, which no dataset here names; "
            f"{way_out}"
        )
    last = int(tokenizer.eod)
    if _padding(tokenizer) == last:
        raise UserError(
            f"the tokenizer pads with the token that documents end with ({last}), and the dataset overwrites "
            f"padding; {way_out}"
        )
    return last


def _padding(tokenizer: Any) -> Any:
    try:
        return tokenizer.pad
    except (AttributeError, NotImplementedError):
        # Tokenizers of megatron-core without this token say so with an error; datasets then pad with none.
        return None


def _tokenizer(datasets: Any) -> Any:
    if datasets is None:
        return None
    for split in (datasets.train, datasets.valid, datasets.test, *datasets.valid_sets.values()):
        for dataset in split if isinstance(split, list) else [split]:
            # A dataset that is wrapped for validation keeps the one it wraps.
            config = getattr(dataset, "config", None) or getattr(
                getattr(dataset, "dataset", None), "config", None
            )
            tokenizer = getattr(config, "tokenizer", None)
            if tokenizer is not None:
                return tokenizer
    return None
