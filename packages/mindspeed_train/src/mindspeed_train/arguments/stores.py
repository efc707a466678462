"""Checks of the flags that may name an object store instead of a folder."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from mindspeed_core.errors import ArgumentError
from mindspeed_train.arguments.errors import argument_error, option
from mindspeed_train.checkpoint.store_url import (
    check_url,
    folder_of,
    is_url,
    protocol_of,
)

_PLACES = ("save", "load", "pretrained_checkpoint")


def check_stores(args: Namespace) -> None:
    """Refuse URLs that cannot hold checkpoints, and spell those of folders (``file://``) as paths."""
    for name in _PLACES:
        location = getattr(args, name)
        if not location or not is_url(location):
            continue
        check_url(option(name), location)
        folder = folder_of(location)
        if folder is not None:
            setattr(args, name, str(folder))
        elif protocol_of(location) == "memory" and args.world_size > 1:
            reason = "is the memory of one process, and ranks do not see each other's"
            raise argument_error(args, option(name), reason, "use one process, or a store")
    staging = args.checkpoint_staging
    if staging is not None and is_url(staging):
        reason = "files are staged on a disk of this machine"
        raise argument_error(args, "--checkpoint-staging", reason, "name a folder")
    if staging is not None and Path(staging).exists() and not Path(staging).is_dir():
        raise ArgumentError("--checkpoint-staging", staging, "is no folder", "name a folder")
