"""Folders of checkpoints in forms that are not read here: named, with the program that converts them.

Megatron-LM's older format ``torch`` holds one pickle for each rank, which runs whatever is in it when it is
read. Torch-free: only names of files are looked at.
"""

from __future__ import annotations

from pathlib import Path

from mindspeed_core.errors import CheckpointError
from mindspeed_megatron.tracker import TRACKER

RELEASE = "release"
"""The folder of weights without a step, as Megatron-LM's converters write it."""
_RANK_FILES = ("model_optim_rng.pt", "model_rng.pt", "distrib_optim.pt", "model.pt")


def is_older_format(directory: Path) -> bool:
    """Return whether a checkpoint has a file for each rank: Megatron-LM's format ``torch``."""
    return any((rank / name).is_file() for rank in directory.glob("mp_rank_*") for name in _RANK_FILES)


def refuse_older_format(directory: Path) -> None:
    """Refuse a checkpoint with a pickle for each rank.

    Raises:
        CheckpointError: it is one; names it and the way out.
    """
    if is_older_format(directory):
        raise CheckpointError(
            f"--load {directory.parent}: {directory.name} is in Megatron-LM's older format `torch`, a pickle "
            "for each rank, which is not read here; convert it with Megatron-LM's script of that run and "
            "--ckpt-convert-format torch_dist --ckpt-convert-save FOLDER, then --load FOLDER/torch_dist "
            "--verify-checkpoint off"
        )


def refuse_without_step(load_dir: Path, problem: str) -> None:
    """Refuse a folder whose tracker names no step and that has no checkpoint of a step.

    Args:
        load_dir: the folder.
        problem: what is wrong with its tracker.

    Raises:
        CheckpointError: its weights are in the folder ``release``, or it has a tracker and nothing else.
    """
    if (load_dir / RELEASE).is_dir():
        refuse_older_format(load_dir / RELEASE)
        raise CheckpointError(
            f"--load {load_dir}: its weights are in {RELEASE}, which is no step; rename that folder to "
            f"iter_0000000, write 0 into {TRACKER}, and add --finetune --verify-checkpoint off"
        )
    if (load_dir / TRACKER).exists():
        raise CheckpointError(
            f"--load {load_dir}: {TRACKER} {problem}, and no checkpoint is there; name another folder, or "
            "remove the file to start from scratch"
        )
