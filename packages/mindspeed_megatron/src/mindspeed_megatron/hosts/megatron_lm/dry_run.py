"""Arguments of Megatron-LM in a dry run: the rank that is planned, a short run, no file read or written."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mindspeed_core.platforms.platform import Platform

if TYPE_CHECKING:
    from mindspeed_core.run import Run

STEPS = 2
"""Steps of a dry run: every later one is like the second, which has the state of the optimizer."""
_FILES = ("save", "load", "pretrained_checkpoint", "tensorboard_dir", "wandb_project", "data_cache_path")


def shorten(platform: Platform, args: Namespace) -> tuple[list[str], dict[str, str]]:
    """Let a dry run be short and touch no file.

    Returns:
        What was changed, one sentence each, and the files that were left alone, by argument; nothing on a
        platform that computes.
    """
    if not platform.dry_run:
        return [], {}
    args.rank, args.world_size, args.local_rank = platform.position(args)
    left = {name: str(value) for name in _FILES if (value := getattr(args, name, None))}
    for name in left:
        setattr(args, name, None)
    options = ", ".join("--" + name.replace("_", "-") for name in left)
    said = [f"dry run: {options} left alone, nothing is read or written"] if left else []
    if args.train_iters:
        args.train_iters = min(args.train_iters, STEPS)
    args.eval_iters, args.save_interval = 0, None
    # Megatron-LM would print a loss that nothing computed.
    args.log_interval = STEPS + 1
    said.append(f"dry run of rank {args.rank} of {args.world_size}: no loss, norm or speed of it is real")
    return said, left


def accounts(run: Run, left: Mapping[str, str]) -> list[str]:
    """Say what this rank has of the checkpoints that were left alone, after its last step.

    Args:
        run: the run.
        left: the files by argument, as `shorten` returns them.
    """
    from mindspeed_megatron.instruments.kept_state import checkpoint_bytes

    args, said = run.args, []
    resumes = not (getattr(args, "finetune", False) or getattr(args, "no_load_optim", False))
    for name, with_optimizer in (("load", resumes), ("pretrained_checkpoint", False)):
        if name in left:
            count = checkpoint_bytes(run, with_optimizer=with_optimizer)
            option = "--" + name.replace("_", "-")
            said.append(f"{option} {left[name]} was not read: {count:,} bytes belong to this rank")
    if "save" in left:
        count = checkpoint_bytes(run, with_optimizer=not getattr(args, "no_save_optim", False))
        said.append(f"--save {left['save']} was not written: {count:,} bytes of this rank in each checkpoint")
    return said
