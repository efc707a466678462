"""The end of a run before its last step: signals, a duration, an interval, agreed by all ranks.

A signal handler only remembers; the loop checks after each step and after each save, and every rank gets the
same answer, so that a signal to one of them (or to all at slightly different moments) saves one step on all.
Ctrl-C is such a signal once, and ends the process at once when it comes again.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mindspeed_megatron.launch import worker
from mindspeed_train.fault_tolerance.signal_reader import SignalReader
from mindspeed_train.launch.supervisor import EXIT_INTERRUPTED, ONE_PRESS_SECONDS
from mindspeed_train.output import say

if TYPE_CHECKING:
    from mindspeed_core.run import Run
    from mindspeed_core.session import Session

ALSO = (signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""End a run whatever ``--exit-signal`` says: batch systems send the first some time before they kill, people
the second, a terminal that is closed the third."""
_MAY_BE_IGNORED = (signal.SIGINT, signal.SIGHUP)
"""Whoever starts a run with nohup, or in the background of a script, wants it to go on."""


class StopControl:
    """Control of the end of this process's run; as a context, it puts earlier signal handlers back."""

    def __init__(self) -> None:
        self.received: int = 0
        self.agreed_signal: int = 0
        self._started = time.monotonic()
        self._before: dict[int, Any] = {}
        self._owner = os.getpid()
        self._reader: SignalReader | None = None
        self._pressed = 0.0
        self._notice = ""
        self._last_words: Callable[[], str] = str

    def start(self, *signals: signal.Signals, notice: str = "", last_words: Callable[[], str] = str) -> None:
        """Start the clock of ``--exit-duration-in-mins`` and remember signals instead of dying of them.

        Only the main thread installs handlers.

        Args:
            signals: that end the run in order; those that are ignored stay so where `_MAY_BE_IGNORED`.
            notice: printed after the first Ctrl-C.
            last_words: returns what is printed after the second, which ends the process.
        """
        self.received = self.agreed_signal = 0
        self._started = time.monotonic()
        self._pressed, self._notice, self._last_words = 0.0, notice, last_words
        if threading.current_thread() is not threading.main_thread():
            return
        for number in dict.fromkeys(signals):
            if number not in _MAY_BE_IGNORED or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._remember)
        if signal.SIGINT in self._before:
            self._reader = SignalReader(self._answer)

    def __enter__(self) -> StopControl:
        return self

    def __exit__(self, *error: object) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
        while self._before:
            number, handler = self._before.popitem()
            # None: the earlier handler was not installed from Python and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        # Forked writers of a checkpoint inherit the handler: what they write is to be finished.
        if os.getpid() == self._owner:
            self.received = self.received or number

    def _answer(self, number: int) -> None:
        """Answer Ctrl-C while the main thread does whatever it does; runs in a thread."""
        if number != signal.SIGINT:
            return
        now = time.monotonic()
        if not self._pressed:
            self._pressed = now
            if self._notice:
                say(self._notice)
        elif now - self._pressed > ONE_PRESS_SECONDS:
            if words := self._last_words():
                say(words)
            os._exit(EXIT_INTERRUPTED)

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


def listen(run: Run, last_words: Callable[[], str]) -> StopControl:
    """Start the control of a run, with the signals that the flags name.

    ``last_words`` are said where a second Ctrl-C ends the run at once.
    """
    control, args, first = run.session.state(StopControl), run.args, run.dist.rank == 0
    if not args.exit_signal_handler or args.skip_train:
        control.start()
        return control
    saves = "saves and ends" if args.save else "ends (without --save nothing is saved)"
    control.start(
        signal.Signals[args.exit_signal],
        *ALSO,
        notice=f"\nSIGINT: the run {saves} after this step; again to stop at once" if first else "",
        # Under a supervisor the second one does not come here.
        last_words=last_words if first and not worker.supervised() else str,
    )
    return control


def save_reason(session: Session, reason: str) -> str:
    """Return the ``reason`` that the stage ``save_checkpoint`` gets at the end of the loop.

    ``reason`` says why the run ended before its last step; it is empty where it did not.
    """
    if not reason:
        return "end"
    return "signal" if session.state(StopControl).agreed_signal else "exit"
