"""Check of the folders that flags name, before a training has run for hours towards them."""

from __future__ import annotations

import os
from argparse import Namespace

from mindspeed_train.arguments.errors import argument_error, option
from mindspeed_train.checkpoint.store_url import is_url

_FOLDERS = (
    "save",
    "load",
    "pretrained_checkpoint",
    "run_dir",
    "tensorboard_dir",
    "wandb_save_dir",
    "data_cache_path",
)


def check_folders(args: Namespace) -> None:
    """Refuse a folder that is a file, or lies below one; one that is missing is made later, or reported.

    Raises:
        ArgumentError: names the flag, the path and what is in the way.
    """
    for name in _FOLDERS:
        path = getattr(args, name, None)
        if path is None or is_url(path):
            continue
        if not path.strip():
            raise argument_error(args, option(name), "names no folder", "name one, or leave the flag out")
        reason = _in_the_way(path)
        if reason:
            raise argument_error(args, option(name), reason, "name a folder")


def _in_the_way(path: str) -> str:
    part = os.path.abspath(path) if "\0" not in path else path
    while True:
        try:
            os.stat(part)
        except FileNotFoundError:
            # A link to something that is not there is in the way of a folder all the same.
            if os.path.islink(part):
                return f"{part} is a link to nothing"
        except NotADirectoryError:
            pass
        except PermissionError:
            return ""
        except (OSError, ValueError) as error:
            return f"is no path ({getattr(error, 'strerror', None) or error})"
        else:
            return "" if os.path.isdir(part) else f"{part} is not a folder"
        part = os.path.dirname(part)
