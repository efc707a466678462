"""Stages that save and load a run. Features contribute their own state and get it back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mindspeed_core.hooks.marker import Done, hookspec

if TYPE_CHECKING:
    from mindspeed_core.run import LoadInfo, Run, SaveInfo
    from mindspeed_core.session import Session

__all__ = [
    "after_load_checkpoint",
    "before_save_checkpoint",
    "checkpoint_state",
    "load_checkpoint",
    "restore_checkpoint_state",
    "save_checkpoint",
]


@hookspec
def load_checkpoint(session: Session, run: Run) -> LoadInfo | Any:
    """Load the checkpoint that the arguments name, or start from nothing.

    Another source (a Hugging Face directory, an adapter on top) replaces or wraps the stage.
    """


@hookspec
def save_checkpoint(session: Session, run: Run, reason: str) -> SaveInfo | Any:
    """Save the run; parameters are complete.

    Args:
        reason: ``"interval"``, ``"signal"``, ``"exit"`` or ``"end"``.
    """


@hookspec
def before_save_checkpoint(session: Session, run: Run) -> Done | Any:
    """Bring parameters and optimizer state into their canonical form before they are collected.

    Parameters are complete.
    """


@hookspec
def after_load_checkpoint(session: Session, run: Run) -> Done | Any:
    """Bring freshly loaded canonical state into the form that training uses.

    Also called after a save, to undo what `before_save_checkpoint` did.
    """


@hookspec(firstresult=False)
def checkpoint_state(session: Session, run: Run) -> Mapping[str, Any] | Any:
    """Contribute a feature's own state.

    Called when saving, with complete parameters, and when loading (to build the template), but not with
    ``--finetune``. Keys are logical names under the feature's own name:
    ``{"my-feature": {"ema": ShardedTensor(...), "updates": 7}}``. Tensors that exist once per logical object
    are ``ShardedTensor`` with global shape and offset, so that any other layout can load them; plain values
    must be the same on every rank. Tensors that are shaped like parameters are described by
    `mindspeed_core.megatron.feature_state.like_parameters`.
    """


@hookspec(firstresult=False)
def restore_checkpoint_state(session: Session, run: Run, state: Mapping[str, Any]) -> None:
    """Take back what `checkpoint_state` contributed. With ``--finetune`` nothing is given back.

    Args:
        state: what every feature stored, by feature name.
    """
