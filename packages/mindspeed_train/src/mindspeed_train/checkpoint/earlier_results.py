"""Earlier results that a run would put behind itself: refused unless ``--start-over`` says that it is meant.

A wrong ``--load`` makes a run start anew. Its first save would name a lower step the latest in ``--save``,
and the next resume would begin there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_core.errors import CheckpointError
from mindspeed_megatron.tracker import iteration_of
from mindspeed_train.checkpoint import publish, source
from mindspeed_train.checkpoint.store_url import folder_of, is_url, masked
from mindspeed_train.launch import last_save
from mindspeed_train.monitoring import records

if TYPE_CHECKING:
    from argparse import Namespace

FLAG = "--start-over"


def check_start(args: Namespace, checkpoint: publish.FoundCheckpoint | None, *, weights_alone: bool) -> None:
    """Refuse a start that lies before what ``--save`` or ``--run-dir`` holds already; for rank 0.

    Args:
        args: of a run that trains.
        checkpoint: the checkpoint that it starts from; None for none.
        weights_alone: only weights are taken from it.

    Raises:
        CheckpointError: names the flags that continue, and the one that starts over.
    """
    if args.start_over:
        return
    start = 0 if checkpoint is None or weights_alone or args.finetune else _step_of(checkpoint)
    if args.ckpt_step is not None and args.load and args.save and _same(args.load, args.save):
        # Going back was asked for.
        return
    saved = source.latest_step(args.save) if args.save else None
    if saved is not None and saved > start:
        raise CheckpointError(
            _refusal(args, checkpoint, start, f"--save {masked(args.save)}", saved, args.save)
        )
    if not args.run_dir:
        return
    folder = Path(args.run_dir)
    noted = last_save.read(folder)
    where = f"--run-dir {folder}"
    if noted is not None and noted.step > start and _exists(noted.checkpoint):
        load = noted.checkpoint.rstrip("/").rpartition("/")[0]
        raise CheckpointError(
            _refusal(args, checkpoint, start, f"{where} (a run that saved)", noted.step, load)
        )
    missed = checkpoint is None and bool(args.load) and not (args.save and _same(args.load, args.save))
    if missed and noted is None and (last := records.last_step(folder)) > start:
        raise CheckpointError(_refusal(args, checkpoint, start, where, last, ""))


def _refusal(
    args: Namespace, found: publish.FoundCheckpoint | None, start: int, where: str, later: int, load: str
) -> str:
    if found is None:
        how = f"--load {masked(args.load)}: holds no checkpoint" if args.load else "without --load"
    elif start:
        how = f"--load {masked(args.load)}: holds step {start}"
    else:
        how = "with the weights of a checkpoint alone"
    way_on = f"give --load {masked(load)} to go on from there" if load else "check the path"
    return (
        f"{how}, so the run would start at step {start}, but {where} holds step {later}; {way_on}, name "
        f"other folders, or add {FLAG} to start at step {start} all the same (earlier records are kept)"
    )


def _step_of(found: publish.FoundCheckpoint) -> int:
    if found.manifest is not None:
        return found.manifest.iteration
    return iteration_of(found.path.name) or 0


def _same(first: str, second: str) -> bool:
    folders = folder_of(first), folder_of(second)
    if None in folders:
        return first.rstrip("/") == second.rstrip("/")
    return os.path.realpath(str(folders[0])) == os.path.realpath(str(folders[1]))


def _exists(checkpoint: str) -> bool:
    return is_url(checkpoint) or Path(checkpoint).exists()
