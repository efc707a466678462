"""Small files that a proof brings along: a folder for each side, gone when the side has trained."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mindspeed_core.discovery.entry_points import load_object
from mindspeed_core.discovery.installed import package_file
from mindspeed_core.feature import DeclarationError

FOLDER = "{files}"
"""The word in a proof's flags that stands for the folder."""


@contextmanager
def flags_with_files(flags: Sequence[str], files: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Put the files into a temporary folder and yield the flags with the folder's path in place.

    Args:
        flags: a side's flags, which may call the folder ``{files}``.
        files: see `mindspeed_core.feature.Scenario`.

    Raises:
        DeclarationError: a file does not exist, or what should write files cannot be loaded.
    """
    if not files:
        yield tuple(flags)
        return
    with tempfile.TemporaryDirectory(prefix="mindspeed-proof-") as name:
        for reference in files:
            _put(reference, Path(name))
        yield tuple(flag.replace(FOLDER, name) for flag in flags)


def _put(reference: str, folder: Path) -> None:
    file = package_file(reference)
    if file is not None:
        shutil.copyfile(file, folder / file.name)
        return
    try:
        write = load_object(reference)
    except (ImportError, AttributeError, ValueError) as error:
        raise DeclarationError(
            f"files of a proof: {reference!r} is neither a file of a package ('package:relative/path') nor a "
            f"function that writes files ('module:function'): {error}"
        ) from error
    write(folder)
