"""Common parts of the benchmarks of whole jobs: a tiny model, a folder that begins empty, and their flags."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

TINY = (
    "--platform cpu --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 64 "
    "--micro-batch-size 1 --mock-data --num-workers 0 --lr 1e-3 --lr-decay-style constant"
).split()
SAVES = {"foreground": (), "background": ("--async-save",)}
"""Ways in which jobs save."""


def options_of_jobs(description: str | None, folder: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every such benchmark; ``folder`` is below ``runs``."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("runs") / folder)
    return parser


def empty(folder: Path) -> Path:
    """Return a folder that exists and holds nothing."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
