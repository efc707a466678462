"""The part of a padded vocabulary that takes part in the softmax.

A vocabulary is padded to a multiple of the tensor-parallel size, and rows of the padding have logits like all
others. So a checkpoint's padding belongs to the function that its model computes: where another layout needs
more rows than the checkpoint has, the further ones are left out of the softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_core.errors import CheckpointError, SessionError
from mindspeed_megatron.unwrap import unwrap

if TYPE_CHECKING:
    from mindspeed_core.session import Session

KEPT = "kept_vocabulary"
"""Attribute of an output layer: ids from here on have no logit. Who makes logits without calling the layer's
module has to leave them out too."""


@dataclass
class Vocabulary:
    """The ids of a session's model that take part in the softmax; None where all rows do."""

    kept: int | None = None


def keep_vocabulary(session: Session, chunks: Sequence[Any], kept: int) -> None:
    """Leave ids from ``kept`` on out of the softmax, in the loss, in predictions further on and in samples.

    Their logits are the least number of the dtype on every rank, and get no gradient.

    Args:
        session: remembers it, for checkpoints.
        chunks: of the model on this rank; those without output layer are left alone.
        kept: the first id that is left out.
    """
    session.state(Vocabulary).kept = kept
    for chunk in chunks:
        layer = getattr(unwrap(chunk), "output_layer", None)
        if layer is None:
            continue
        if getattr(layer, KEPT, None) is None:
            layer.register_forward_hook(_leave_out)
        setattr(layer, KEPT, kept)


def settle_vocabulary(
    session: Session,
    chunks: Sequence[Any],
    *,
    saved: int | None,
    rows: int | None,
    ids: int | None,
    where: str,
) -> list[str]:
    """Give a loaded model the padding of its checkpoint.

    Args:
        session: the open session.
        chunks: of the model on this rank.
        saved: ids that took part in the softmax of the checkpoint; None where it does not say.
        rows: of this run's padded vocabulary; None where it is not known.
        ids: of this run's vocabulary without padding, where known.
        where: the checkpoint.

    Returns:
        What a user should know.

    Raises:
        CheckpointError: the vocabulary has ids that the checkpoint has no rows for.
    """
    if saved is None or rows is None:
        return []
    if ids is not None and ids > saved:
        raise CheckpointError(
            f"{where}: another vocabulary: --vocab-size {saved} with its padding (checkpoint) / {ids} (this "
            "run); use the checkpoint's tokenizer or --vocab-size"
        )
    now = session.state(Vocabulary).kept or rows
    if saved < now:
        keep_vocabulary(session, chunks, saved)
    elif saved > rows:
        return [
            f"{where}: the last {saved - rows} of the {saved} rows of its padded vocabulary are left out; "
            "they took part in its softmax, so losses differ a little"
        ]
    return []


def _leave_out(layer: Any, inputs: tuple[Any, ...], output: Any) -> Any:
    logits = output[0] if isinstance(output, tuple) else output
    if logits is (inputs[0] if inputs else None):
        # Whoever asked for no logits makes them itself, see `KEPT`.
        return None
    columns, share = logits.shape[-1], layer.output_size_per_partition
    if columns == layer.output_size:
        first = 0
    elif columns == share and share * layer.tp_group.size() == layer.output_size:
        first = layer.tp_group.rank() * share
    else:
        raise SessionError(
            f"the output layer returned {columns} columns for a vocabulary of {layer.output_size}, of which "
            f"ids from {getattr(layer, KEPT)} on are padding that the checkpoint does not have; resume under "
            "a tensor-parallel size that divides the checkpoint's padded vocabulary"
        )
    kept = max(0, getattr(layer, KEPT) - first)
    if kept < columns:
        # In place: the logits are the largest tensor of a step.
        logits[..., kept:] = torch.finfo(logits.dtype).min
    return None
