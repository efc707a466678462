"""Arguments of Megatron-LM in a dry run: the rank that is planned, a short run, no file read or written."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_core.platforms.platform import Platform

STEPS = 2
"""Steps of a dry run: every later one is like the second, which has the state of the optimizer."""
_FILES = ("save", "load", "pretrained_checkpoint", "tensorboard_dir", "wandb_project", "data_cache_path")


def shorten(platform: Platform, args: Namespace) -> list[str]:
    """Let a dry run be short and touch no file.

    Returns:
        What was changed, one sentence each; nothing on a platform that computes.
    """
    if not platform.dry_run:
        return []
    args.rank, args.world_size, args.local_rank = platform.position(args)
    left = [name for name in _FILES if getattr(args, name, None)]
    for name in left:
        setattr(args, name, None)
    options = ", ".join("--" + name.replace("_", "-") for name in left)
    said = [f"dry run: {options} left alone, nothing is read or written"] if left else []
    if args.train_iters:
        args.train_iters = min(args.train_iters, STEPS)
    args.eval_iters, args.save_interval = 0, None
    # Megatron-LM would print a loss that nothing computed.
    args.log_interval = STEPS + 1
    return [*said, f"dry run of rank {args.rank} of {args.world_size}: no loss, norm or speed of it is real"]
