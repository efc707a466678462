"""The end of a run before its last step: signals, a duration, an interval, agreed by all ranks.

A signal handler only remembers; the loop checks after each step and after each save, and every rank gets the
same answer, so that a signal to one of them (or to all at slightly different moments) saves one step on all.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from mindspeed_core.run import Run
    from mindspeed_core.session import Session

ALSO = signal.SIGUSR1
"""Ends a run whatever ``--exit-signal`` says: batch systems send it some time before they kill."""


class StopControl:
    """Control of the end of this process's run; as a context, it puts earlier signal handlers back."""

    def __init__(self) -> None:
        self.received: int = 0
        self.agreed_signal: int = 0
        self._started = time.monotonic()
        self._before: dict[int, Any] = {}
        self._owner = os.getpid()

    def start(self, *signals: signal.Signals) -> None:
        """Start the clock of ``--exit-duration-in-mins`` and remember signals instead of dying of them.

        Only the main thread installs handlers.
        """
        self.received = self.agreed_signal = 0
        self._started = time.monotonic()
        if threading.current_thread() is not threading.main_thread():
            return
        for number in dict.fromkeys(signals):
            self._before[number] = signal.signal(number, self._remember)

    def __enter__(self) -> StopControl:
        return self

    def __exit__(self, *error: object) -> None:
        while self._before:
            number, handler = self._before.popitem()
            # None: the earlier handler was not installed from Python and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        # Forked writers of a checkpoint inherit the handler: what they write is to be finished.
        if os.getpid() == self._owner:
            self.received = self.received or number

    def reason(self, run: Run) -> str:
        """Return why the run ends now, or an empty string; the same on every rank. Collective.

        The collective is spared where neither signals nor a duration can end the run.
        """
        args = run.args
        minutes = args.exit_duration_in_mins
        if args.exit_signal_handler or minutes:
            late = bool(minutes) and (time.monotonic() - self._started) / 60.0 >= minutes
            number, late = _largest(run, self.received, late)
            if number:
                self.agreed_signal = number
                return f"received {signal.Signals(number).name}"
            if late:
                return f"--exit-duration-in-mins {minutes:g}"
        interval = args.exit_interval
        if interval and run.iteration % interval == 0 and run.iteration < args.train_iters:
            return f"--exit-interval {interval}"
        return ""


def _largest(run: Run, number: int, late: bool) -> tuple[int, bool]:
    if run.dist.world_size == 1 or run.session.platform.dry_run:
        return number, late
    facts = torch.tensor([number, int(late)], dtype=torch.int32, device=run.dist.device)
    dist.all_reduce(facts, op=dist.ReduceOp.MAX)
    highest, any_late = facts.tolist()
    return highest, bool(any_late)


def listen(session: Session) -> StopControl:
    """Start the control of a session's run, with the signals that the flags name."""
    control, args = session.state(StopControl), session.args
    control.start(*(signal.Signals[args.exit_signal], ALSO) if args.exit_signal_handler else ())
    return control


def save_reason(session: Session, reason: str) -> str:
    """Return the ``reason`` that the stage ``save_checkpoint`` gets at the end of the loop.

    ``reason`` says why the run ended before its last step; it is empty where it did not.
    """
    if not reason:
        return "end"
    return "signal" if session.state(StopControl).agreed_signal else "exit"
