"""Arguments of the model taken from the checkpoint that is to be loaded: ``--use-checkpoint-args``.

The manifest of a checkpoint records what decides the shapes of the model, and its common state the whole
configuration; Megatron-LM's checkpoints hold its arguments. A flag that is given wins, and loading refuses it
where the models differ. Torch-free as long as no checkpoint is read, since every
plan passes here.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import ArgumentError
from mindspeed_core.flags.notes import FlagNote
from mindspeed_core.flags.presets import DEFAULT
from mindspeed_train.arguments.stand_downs import stand_down_before_plan

if TYPE_CHECKING:
    from mindspeed_train.checkpoint.publish import FoundCheckpoint

COMMON_STATE = "common.pt"
_FLAG = "--use-checkpoint-args"
_DESTS = {"padded_vocab_size": "asked_padded_vocab_size"}
"""Attributes that a flag stores under another name than validation."""


def complete(
    args: Namespace, provenance: MutableMapping[str, str], claimable: Callable[[str, Any], bool]
) -> list[FlagNote]:
    """Complete the arguments before the plan is made: from a checkpoint, and by what stands down.

    Args:
        args: the parsed arguments; changed.
        provenance: where each came from; changed.
        claimable: see `stand_down_before_plan`.
    """
    _from_checkpoint(args, provenance)
    return stand_down_before_plan(args, claimable)


def _from_checkpoint(args: Namespace, provenance: MutableMapping[str, str]) -> None:
    """Fill in what the checkpoint says of the model and no flag does; changes both arguments.

    Without a checkpoint in ``--load`` the flags describe the model, as in Megatron-LM.

    Raises:
        ArgumentError: there is no place to read from, or nothing is recorded there.
        mindspeed_core.errors.CheckpointError: the manifest is damaged.
    """
    if not args.use_checkpoint_args:
        return
    place = args.load or args.pretrained_checkpoint
    if not place:
        raise ArgumentError(_FLAG, None, "there is nothing to read from", "add --load FOLDER")
    # Torch comes with it, which a plan without a checkpoint does not need.
    from mindspeed_train.checkpoint.source import find

    found = find(place, args.ckpt_step, accept_unpublished=True)
    if found is None:
        return
    recorded = _recorded(found)
    if not recorded:
        raise ArgumentError(
            _FLAG,
            None,
            f"{found.url or found.path} has neither manifest nor arguments that describe its model",
            "give the model's flags",
        )
    for name, value in recorded.items():
        dest = _DESTS.get(name, name)
        if provenance.get(dest, "") == DEFAULT:
            setattr(args, dest, value)
            provenance[dest] = f"checkpoint {found.url or found.path}"


def _recorded(found: FoundCheckpoint) -> dict[str, Any]:
    """Return what a checkpoint says of its model, by name of the argument."""
    values = dict(found.manifest.model) if found.manifest is not None else {}
    if found.url or not (found.path / COMMON_STATE).is_file():
        return values
    from mindspeed_megatron.model_record import KEY, read_record
    from mindspeed_train.arguments.recorded_model import foreign_arguments, recorded_arguments
    from mindspeed_train.checkpoint.common_state import read_common

    common = read_common(found.path)
    record = read_record((common.get("features") or {}).get(KEY), str(found.path))
    if record is not None:
        return {**recorded_arguments(record), **values}
    if found.manifest is None and common.get("args") is not None:
        return foreign_arguments(vars(common["args"]))
    return values
