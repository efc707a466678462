"""The file of a dump for proofs."""

from __future__ import annotations

import json
from pathlib import Path


def write_config(folder: Path) -> None:
    """Write ``dump.json``, which dumps two steps into the folder."""
    content = {"dump_path": str(folder / "datadump"), "step": [0, 1]}
    (folder / "dump.json").write_text(json.dumps(content), encoding="utf-8")
