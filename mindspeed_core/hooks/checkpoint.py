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
    "model_state",
    "restore_checkpoint_state",
    "save_checkpoint",
]


@hookspec(added={"source": "1.1"})
def load_checkpoint(session: Session, run: Run, source: str | None) -> LoadInfo | Any:
    """Load the checkpoint that the arguments name, or start from nothing.

    The host calls it once, without a source. A wrapper may call it again with one before its ``yield``, for
    weights that the run's own checkpoints leave out, such as the base under an adapter:
    ``session.call("load_checkpoint", run=run, source=folder)``. Every wrapper sees both calls. Another form
    of weights (a Hugging Face directory) replaces or wraps the stage.

    Args:
        source: None for what ``--load`` names. Otherwise a folder of checkpoints, or one of them: its weights
            alone are loaded, those that `model_state` chooses for it, and nothing else of the run changes.

    Returns:
        A `LoadInfo`; with a source it says where the weights came from.
    """


@hookspec(since="1.1")
def model_state(
    session: Session, run: Run, source: str | None, metadata: Mapping[str, Any]
) -> dict[str, dict[str, Any]] | Any:
    """Describe the weights that a checkpoint holds: what is saved, and what a load fills.

    Called whenever the run is saved, and for each load. The default describes every weight. A wrapper may
    leave entries out, or change the ``key`` of a ``ShardedTensor`` to the name that the weight has in foreign
    checkpoints. Weights that are trained cannot be left out. After a load, weights that were left out must
    have come from another source, or have been counted with
    ``mindspeed_megatron.model_state.count_as_loaded``.

    Args:
        source: None for the run's own checkpoints, to save and to load; otherwise the folder that
            `load_checkpoint` was called with.
        metadata: how state is laid out in the file, as megatron-core's ``sharded_state_dict`` takes it.

    Returns:
        For each chunk (``"model"``, or ``"model0"``, ``"model1"``, … with virtual stages) the
        ``sharded_state_dict`` of the unwrapped chunk, by names of its ``state_dict``.
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
    `mindspeed_megatron.feature_state.like_parameters`.

    In the checkpoint a shard's key is ``features.NAME.KEY``. Every host adds this prefix when it saves and
    looks for it when it loads; a feature's own keys are without it.
    """


@hookspec(firstresult=False)
def restore_checkpoint_state(session: Session, run: Run, state: Mapping[str, Any]) -> None:
    """Take back what `checkpoint_state` contributed. With ``--finetune`` nothing is given back.

    Args:
        state: what every feature stored, by feature name.
    """
