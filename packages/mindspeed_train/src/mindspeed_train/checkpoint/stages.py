"""Default stages that save and load a run, in megatron-core's distributed format.

The stages are thin: `content` says what is saved, `save` how, `load` is the way back, and `publish` makes a
directory a checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_core.feature import hookimpl
from mindspeed_core.run import LoadInfo, Run, SaveInfo
from mindspeed_train.checkpoint import load as checkpoint_load
from mindspeed_train.checkpoint.dry_run import not_read, not_written
from mindspeed_train.checkpoint.save import Saver

if TYPE_CHECKING:
    from mindspeed_core.session import Session


@hookimpl(trylast=True)
def load_checkpoint(run: Run, source: str | None) -> LoadInfo:
    """Load what ``--load`` names, or start from nothing; the weights alone of another source."""
    if run.session.platform.dry_run:
        return not_read()
    return checkpoint_load.load(run, source)


@hookimpl(trylast=True)
def save_checkpoint(session: Session, run: Run, reason: str) -> SaveInfo:
    """Save into ``--save``; with ``--async-save`` an interval save is published by a later `Saver.poll`."""
    if session.platform.dry_run:
        return not_written(run)
    return session.state(Saver).save(run, reason)
