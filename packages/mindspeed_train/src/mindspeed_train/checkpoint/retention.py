"""The rule by which older checkpoints are deleted when a newer one is published."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """The checkpoints that stay.

    Attributes:
        keep_last_n: the newest ones; None for no limit.
        interval: Megatron-LM's ``--save-retain-interval``: the checkpoint before the new one stays only where
            this divides its step; None keeps it.
    """

    keep_last_n: int | None = None
    interval: int | None = None

    @classmethod
    def of(cls, args: Namespace) -> Retention:
        """Return the rule that the arguments ask for."""
        return cls(args.keep_last_n, args.save_retain_interval)

    def retires(self, before: int | None, step: int) -> bool:
        """Return whether the checkpoint that was the latest goes when the one of ``step`` is published."""
        return bool(self.interval and before and before != step and before % self.interval)
