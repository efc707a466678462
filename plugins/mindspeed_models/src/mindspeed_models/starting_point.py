"""The Hugging Face folder that a run starts from, where it has no checkpoint of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspeed_megatron.tracker import TRACKER
from mindspeed_models.model_names import CONFIG_FILE

if TYPE_CHECKING:
    from argparse import Namespace

LOAD, PRETRAINED = "--load", "--pretrained-checkpoint"


def folders(args: Any) -> list[tuple[str, str]]:
    """Return the folders with a ``config.json`` that flags name as weights, each with its flag.

    A folder that training has saved into is none, whatever else lies in it. Torch-free, for planning.
    """
    named = ((LOAD, getattr(args, "load", None)), (PRETRAINED, getattr(args, "pretrained_checkpoint", None)))
    return [(flag, folder) for flag, folder in named if folder and is_model_folder(folder)]


def is_model_folder(folder: str) -> bool:
    """Return whether a folder is one of Hugging Face: ``config.json``, and no checkpoint of a training."""
    from pathlib import Path

    try:
        path = Path(folder)
        return (path / CONFIG_FILE).is_file() and not (path / TRACKER).is_file()
    except (OSError, ValueError):
        # A name that is too long or holds a null byte.
        return False


def starting_folder(args: Namespace, *, training: bool) -> tuple[str, str] | None:
    """Return flag and folder of the weights that a run begins with. Collective.

    None where it begins with something else: a checkpoint of this job, of ``--load``, or new weights.

    Raises:
        CheckpointError: a run that trains would begin before what ``--save`` or ``--run-dir`` holds.
    """
    from pathlib import Path

    from mindspeed_train.interface import check_start, on_first_rank, publish

    def choose() -> tuple[str, str] | None:
        from mindspeed_train.interface import latest_step, own_checkpoint

        found = dict(folders(args))
        if not found or own_checkpoint(args) is not None:
            return None
        flag = LOAD if LOAD in found else PRETRAINED
        if flag == PRETRAINED and args.load and latest_step(args.load) is not None:
            return None
        if training and hasattr(args, "start_over"):
            check_start(args, publish.FoundCheckpoint(Path(found[flag]), None), weights_alone=True)
        return flag, found[flag]

    chosen: tuple[str, str] | None = on_first_rank(LOAD, choose)
    return chosen
