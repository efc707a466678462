"""The ranks of a plan: which ones are run, and their records."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from types import TracebackType
from typing import Any

from mindspeed_core.errors import UserError
from mindspeed_tune.kinds import Kind, chosen_ranks, group_partners, kinds_of, stage_partners
from mindspeed_tune.launch_command import LaunchCommand
from mindspeed_tune.layout import RANKS_PER_NODE, Layout
from mindspeed_tune.record import RankRecord
from mindspeed_tune.warm_process import PlanError, WarmProcess

__all__ = ["ALL", "KINDS", "PlanError", "Ranks", "records_of"]

KINDS, ALL = "kinds", "all"
_MOST = 512


class Ranks:
    """Runs ranks of one command, each in a fresh process forked from one that has everything imported."""

    def __init__(
        self,
        command: LaunchCommand,
        *,
        platform: str = "fake",
        exact_layers: bool = False,
        exact_microbatches: bool = False,
        skew: float | None = None,
        reliefs: bool = True,
        process: WarmProcess | None = None,
    ) -> None:
        """Plan a command.

        Args:
            command: that starts the training.
            platform: a dry run.
            exact_layers: run all layers.
            exact_microbatches: run all micro-batches.
            skew: tokens of this rank's experts, as a multiple of the average.
            reliefs: ask what features that are not active would keep less.
            process: a running one that other commands share; by default one of its own.
        """
        self.command = command
        self.platform = platform if process is None else process.platform
        self.exact_layers, self.exact_microbatches = exact_layers, exact_microbatches
        self.skew = skew
        self.reliefs = reliefs
        self.per_node = command.ranks_per_node or RANKS_PER_NODE
        self._process = process
        self._own = ExitStack()

    def __enter__(self) -> Ranks:
        """Begin to use the process that forks ranks, which starts with the first of them."""
        if self._process is None:
            self._process = self._own.enter_context(WarmProcess(self.platform))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process that was started."""
        self._own.__exit__(kind, error, trace)

    def run(self, ranks: Sequence[int], *, only_order: bool = False) -> list[RankRecord]:
        """Run ranks; return their records in the order asked for.

        Raises:
            PlanError: one of them cannot be planned.
            UserError: the kernels of NPUs are wanted, and torch_npu or its stand-in runtime is missing.
        """
        if self._process is None:
            raise RuntimeError("enter the context first")
        options = {
            "exact_layers": self.exact_layers,
            "exact_microbatches": self.exact_microbatches,
            "only_order": only_order,
            "reliefs": self.reliefs,
        }
        submitted = [
            self._process.submit(
                {
                    "rank": rank,
                    "world_size": self.command.world_size,
                    "per_node": self.per_node,
                    "platform": self.platform,
                    "command": asdict(self.command),
                    "options": options,
                    "skew": self.skew,
                }
            )
            for rank in ranks
        ]
        return [self._record(future.result()) for future in submitted]

    def _record(self, outcome: dict[str, Any]) -> RankRecord:
        if outcome["kind"] == "record":
            return RankRecord.from_json(outcome["record"])
        if outcome["kind"] == "explained":
            raise PlanError(outcome["text"])
        told = [f"rank {outcome['rank']} could not be planned: {outcome['text']}"]
        if os.environ.get("MINDSPEED_TRACEBACK") and outcome.get("traceback"):
            told.append(outcome["traceback"])
        elif outcome.get("output", "").strip():
            told += [
                "it printed last:",
                *(f"  {line}" for line in outcome["output"].strip().splitlines()[-6:]),
            ]
        raise PlanError("\n".join(told))


def records_of(ranks: Ranks, wanted: str = KINDS, *, partners: bool = True) -> list[RankRecord]:
    """Run the ranks that a plan is made of.

    Args:
        ranks: the open runner.
        wanted: ``kinds`` (one rank of every kind, and a partner for every kind of call), ``all``, or a list.
        partners: run those partners too; without them sizes are the same, and fewer calls are compared.

    Raises:
        PlanError: a rank cannot be planned.
        UserError: ``wanted`` names no ranks of the world.
    """
    world = ranks.command.world_size
    if wanted == ALL:
        if world > _MOST:
            raise UserError(
                f"--plan-ranks all runs {world:,} processes; use kinds, or name up to {_MOST} ranks"
            )
        return ranks.run(range(world))
    if wanted != KINDS:
        return ranks.run(chosen_ranks(wanted, world))
    [first] = ranks.run([0])
    layout: Layout = first.layout
    kinds = kinds_of(layout, first.stages)
    representatives = [kind.representative for kind in kinds if kind.representative != 0]
    found = [first, *ranks.run(representatives)]
    further = _partners(layout, kinds, found) if partners else []
    return [*found, *ranks.run(further, only_order=True)] if further else found


def _partners(layout: Layout, kinds: Sequence[Kind], found: Sequence[RankRecord]) -> list[int]:
    """Return ranks that are run so that every kind of call is compared with another member's."""
    known = [record.rank for record in found]
    partners = [rank for rank in stage_partners(layout, kinds) if rank not in known]
    checked: set[tuple[str, str]] = set()
    for record in found:
        partners += group_partners(record, [*known, *partners], checked)
    return list(dict.fromkeys(partners))
