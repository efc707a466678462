"""Sizes of a run's model that bound what it is asked: tokens that may be drawn, and positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_core.errors import UserError
from mindspeed_megatron.unwrap import unwrap

if TYPE_CHECKING:
    from mindspeed_core.run import Run


def drawable_tokens(run: Run) -> int:
    """Return how many tokens a run's arguments name; rows that pad the vocabulary are not among them.

    Raises:
        UserError: they name none.
    """
    named = getattr(run.args, "vocab_size", None)
    if named is None:
        raise UserError(
            "generating: the session does not know how many of the vocabulary's rows are tokens; pass "
            "vocab_size"
        )
    return int(named)


def positions(run: Run) -> int:
    """Return how many positions a run's model has."""
    args = run.args
    named = getattr(args, "max_position_embeddings", None) or getattr(args, "seq_length", None)
    return int(named or unwrap(run.model[0]).max_sequence_length)
