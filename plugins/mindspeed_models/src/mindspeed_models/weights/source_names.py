"""Names, order and shards of Hugging Face's files, remembered so that an export gives the same files back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from mindspeed_models.weights.hf_files import HfFiles

NAMES = "weight_files.json"


@dataclass(frozen=True)
class SourceNames:
    """The files that a model came from.

    Attributes:
        files: names of tensors in the order of each file, by name of the file.
        prefix: what the files leave out of names that the table has.
    """

    files: dict[str, list[str]]
    prefix: str = ""


def describe_names(files: HfFiles) -> str:
    """Return the names of open files as text."""
    return json.dumps({"files": files.listing(), "prefix": files.prefix}) + "\n"


def read_names(folder: Path) -> SourceNames | None:
    """Return what `describe_names` wrote into a folder; None where it did not."""
    path = folder / NAMES
    if not path.is_file():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    return SourceNames(dict(found["files"]), found["prefix"])
