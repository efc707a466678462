"""Checkpoints in a dry run: what this rank would read and write is counted, and no file is touched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_core.run import LoadInfo, SaveInfo
from mindspeed_megatron.instruments.kept_state import checkpoint_bytes

if TYPE_CHECKING:
    from mindspeed_core.run import Run


def not_read() -> LoadInfo:
    """Read nothing: the run begins at step 0."""
    return LoadInfo(path=None)


def unread_bytes(run: Run) -> int:
    """Return the bytes of ``--load`` that belong to this rank; the optimizer has its state after a step."""
    args = run.args
    return checkpoint_bytes(run, with_optimizer=not (args.finetune or args.no_load_optim))


def not_written(run: Run) -> SaveInfo:
    """Count the bytes that this rank would save."""
    saved = checkpoint_bytes(run, with_optimizer=not run.args.no_save_optim)
    path = f"nothing: {saved:,} bytes of this rank would go to {run.args.save}"
    return SaveInfo(path=path, iteration=run.iteration)
