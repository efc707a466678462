"""The order in which a script returns a micro-batch, and a `Batch` made of it and back.

Scripts up to core_v0.17 return tokens, labels, loss mask, attention mask, positions and, from 0.16 on, a
description of packed sequences. Those of core_v0.18 and later return ten parts in the order of their names,
and make the description from them afterwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from mindspeed_core.errors import UserError
from mindspeed_core.run import Batch

FIELDS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids", "packed_seq_params")
"""Order in which scripts of language models return a batch; 0.15 and older leave the last out."""

NAMED = (
    *("attention_mask", "cu_seqlens", "cu_seqlens_padded", "hybrid_cp_group", "labels", "local_cp_size"),
    *("loss_mask", "max_seqlen", "position_ids", "tokens"),
)
"""Order of scripts of core_v0.18 and later."""


def reads_samples(fetch: Callable[..., Any] | None) -> bool:
    """Return whether a script reads samples itself and hands them to ``get_batch_on_this_tp_rank``."""
    return fetch is not None and "batch" in inspect.signature(fetch).parameters


def batch_of(values: Sequence[Any], padding_mask: Any) -> Batch | None:
    """Return what a script's ``get_batch`` returned as a batch; None for another kind of model.

    Args:
        values: tokens and the like, ``[b, s]`` or None.
        padding_mask: bool ``[b, s]``, or None without padding.
    """
    if len(values) == len(NAMED):
        parts = dict(zip(NAMED, values))
        kept = {name: parts[name] for name in FIELDS if name in parts}
        return Batch(**kept, packed_seq_params=_description(parts), padding_mask=padding_mask)
    if len(values) in (len(FIELDS) - 1, len(FIELDS)):
        return Batch(**dict(zip(FIELDS, values)), padding_mask=padding_mask)
    return None


def values_of(
    batch: Batch, given: Sequence[Any] | None, described: Any, *, named: bool
) -> list[Any] | tuple[Any, ...]:
    """Return a batch in the order of the script.

    Args:
        batch: after features have changed it.
        given: what the script's own function returned; None where a feature never called it.
        described: the script's own description, which it makes again from the parts that it returned.
        named: the script is of core_v0.18 or later.

    Raises:
        UserError: the script has no place for a description of the batch.
    """
    if named:
        own = given if batch.packed_seq_params is described else None
        parts = dict(zip(NAMED, own)) if own is not None else {}
        return [getattr(batch, name) if name in FIELDS else parts.get(name) for name in NAMED]
    length = len(given) if given is not None else len(FIELDS)
    if batch.packed_seq_params is not None and length < len(FIELDS):
        raise UserError(
            "an active feature describes the batch, and the forward step of this script passes no "
            "packed_seq_params on to the model; use the script of core_v0.16.1"
        )
    return tuple(getattr(batch, name) for name in FIELDS[:length])


def _description(parts: dict[str, Any]) -> Any:
    """Describe packed sequences as the script's forward step does after this."""
    ends = parts["cu_seqlens"]
    if ends is None:
        return None
    from megatron.core.packed_seq_params import PackedSeqParams

    ends, padded = ends.squeeze(0), parts["cu_seqlens_padded"]
    padded = None if padded is None else padded.squeeze(0)
    used = ends if padded is None else padded
    longest, size = int(parts["max_seqlen"].item()), parts["local_cp_size"]
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=used,
        cu_seqlens_kv=used,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        local_cp_size=None if size is None else int(size.item()),
        cp_group=parts["hybrid_cp_group"],
    )
