"""The log of a dry run: what was counted. Losses, norms and speeds do not exist and are not shown."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from mindspeed_core.terminal.listing import for_terminal
from mindspeed_train.checkpoint.dry_run import unread_bytes
from mindspeed_train.monitoring.run_log import RunLog

if TYPE_CHECKING:
    from mindspeed_core.run import Run

STEPS = 2
"""Steps of a dry run: every later one is like the second, which has the state of the optimizer."""
_MIB = 2**20


class DryRunLog(RunLog):
    """Prints on the one rank there is, and writes nothing."""

    def __init__(self, run: Run, output: TextIO | None = None) -> None:
        """Print to ``output``, standard output by default."""
        super().__init__(None, total=run.args.train_iters, start=run.iteration, progress=False)
        self._run = run
        self._to = output or sys.stdout

    def step(self, numbers: Mapping[str, Any]) -> None:
        """Show what a step held and communicated."""
        platform = self._run.session.platform
        peak = platform.peak_memory()
        held = platform.memory_allocated()
        self.say(
            f"step {numbers['step']}/{self.total} | {held.bytes / _MIB:,.1f} MiB ({held.source}) after it, "
            f"peak of the update {peak.bytes / _MIB:,.1f} MiB"
        )

    def validation(self, step: int, losses: Mapping[str, float], split: str = "valid") -> None:
        """Show that a validation ran."""
        self.say(
            f"step {step}/{self.total} | {'validation' if split == 'valid' else 'test'}: one batch forward"
        )

    def say(self, text: str) -> None:
        """Print lines."""
        print(for_terminal(text, self._to), file=self._to, flush=True)

    def end(self) -> None:
        """Show what the phases of a step held, what was communicated, and that no other number is real."""
        platform: Any = self._run.session.platform
        for phase in platform.storage.report():
            kinds = ", ".join(f"{kind} {size / _MIB:,.1f}" for kind, size in phase.kinds.items())
            self.say(f"{phase.name}: peak {phase.peak / _MIB:,.1f} MiB ({kinds})")
        taken, call = platform.communication.largest_temporary(platform.backend_temporaries)
        if call is not None:
            self.say(f"beside tensors, the backend takes up to {taken / _MIB:,.1f} MiB during {call}")
        if self._run.args.load:
            loaded = unread_bytes(self._run)
            self.say(f"--load {self._run.args.load} was not read: {loaded:,} bytes belong to this rank")
        calls = len(platform.communication.calls)
        self.say(
            f"dry run of rank {self._run.dist.rank} of {self._run.dist.world_size}: {calls:,} calls of "
            "communication were counted. Nothing was computed, read or written, so there are no losses, "
            f"norms or speeds; {sum(platform.answers.counts.values())} numbers that code read were made up"
        )
