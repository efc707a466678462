"""The measured batches of a run (``--profile-pipeline``), and what follows from them."""

from __future__ import annotations

import logging
from argparse import Namespace
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import UserError
from mindspeed_pp.asked import AUTO, FLAG, TIMES_FROM_FLAG
from mindspeed_pp.choice import CANDIDATES, shortest
from mindspeed_pp.lint import lint
from mindspeed_pp.plan import Plan
from mindspeed_pp.recorder import UNMEASURED, Batch, Recorder, gathered, write_profile
from mindspeed_pp.registry import rule_named
from mindspeed_pp.schedule import Schedule
from mindspeed_pp.simulator import simulate
from mindspeed_pp.stage_times import Measured

if TYPE_CHECKING:
    from mindspeed_core.run import Run

logger = logging.getLogger("mindspeed_core")

WORTH = 0.99
"""Of a step's time what another schedule has to stay below: readings of clocks scatter."""


@dataclass
class Profiling:
    """Measurements so far.

    Attributes:
        before: batches of the schedule that ran unmeasured.
        batches: measured ones.
        schedule: of all of them.
        done: the profile is written.
    """

    before: int = 0
    batches: list[Batch] = field(default_factory=list)
    schedule: Schedule | None = None
    done: bool = False

    def recorder(self, args: Namespace, schedule: Schedule, platform: Any) -> Recorder | None:
        """Return the clock of a batch that is measured; None where none is."""
        if self.done or not getattr(args, "profile_pipeline", None) or platform.dry_run:
            return None
        if schedule != self.schedule:
            self.before, self.batches, self.schedule = 0, [], schedule
        if self.before < UNMEASURED:
            self.before += 1
            return None
        return Recorder(platform)

    def add(self, recorder: Recorder, run: Run, args: Namespace, pg: Any, plan: Plan) -> Plan | None:
        """Keep a batch; with the last one write the profile. Collective over all ranks then.

        Returns:
            What trains from here on in place of ``plan``, or None where that stays.
        """
        self.batches.append((recorder.spans, recorder.waited))
        if len(self.batches) < args.profile_pipeline_steps:
            return None
        self.done = True
        assert self.schedule is not None
        profile = gathered(self.batches, self.schedule, pg, getattr(args, "num_layers", None))
        self.batches = []
        if run.dist.rank == 0:
            try:
                write_profile(profile, Path(args.profile_pipeline))
            except UserError as error:
                logger.warning("%s; training goes on without it", error)
            logger.info("--profile-pipeline %s: %s", args.profile_pipeline, profile.sentence())
        if getattr(args, "pipeline_schedule", None) != AUTO:
            return None
        found = better(plan, profile.measured, self.schedule.microbatches)
        if run.dist.rank == 0:
            for line in _said(found, plan, profile.measured, self.schedule.microbatches, args):
                logger.info("%s %s: %s", FLAG, AUTO, line)
        return found


def better(plan: Plan, measured: Measured, microbatches: int) -> Plan | None:
    """Return a plan of the same model with a shorter step by measured times; None where there is none.

    Stages stay where they are, and weight gradients are put off only where the model's linears can.
    """
    told = replace(plan, measured=measured, times=measured.of_rank(plan.ranks))
    best, least = None, WORTH * simulate(told.schedule(microbatches), told.costs).makespan
    for rule in map(rule_named, CANDIDATES):
        if rule.name == plan.rule.name or rule.refusal(plan.ranks, plan.chunks, microbatches):
            continue
        if rule.place(plan.ranks, plan.chunks) != plan.placement or (rule.splits and not plan.rule.splits):
            continue
        other = replace(told, rule=rule, moves_weights=plan.moves_weights and rule.splits)
        schedule = other.schedule(microbatches)
        try:
            lint(schedule, plan.limit)
        except UserError:
            # More micro-batches alive than --pipeline-memory-limit.
            continue
        length = simulate(schedule, other.costs).makespan
        if length < least:
            best, least = other, length
    return best


def _said(
    found: Plan | None, plan: Plan, measured: Measured, microbatches: int, args: Namespace
) -> list[str]:
    name = plan.rule.name if found is None else found.rule.name
    lines = [f"with measured times {name} {'stays' if found is None else 'takes over'}"]
    layers, times = getattr(args, "num_layers", None), measured.of_rank(plan.ranks)
    splits = getattr(args, "transformer_impl", None) in (None, "local")
    elsewhere = rule_named(shortest(plan.ranks, None, layers, microbatches, times, splits, measured))
    chunks = elsewhere.chunks or plan.chunks
    other = Plan(elsewhere, plan.ranks, chunks, times=times, measured=measured)
    if other.placement == plan.placement or other.refusal(microbatches):
        return lines
    here = found or replace(plan, measured=measured, times=times)
    lengths = [simulate(each.schedule(microbatches), each.costs).makespan for each in (other, here)]
    if lengths[0] < WORTH * lengths[1]:
        lines.append(
            f"{elsewhere.name}, which places stages elsewhere, would take {lengths[0] * 1e3:.2f} ms instead "
            f"of {lengths[1] * 1e3:.2f}; give {FLAG} {elsewhere.name}, or {TIMES_FROM_FLAG} "
            f"{args.profile_pipeline}, and no number of virtual stages"
        )
    return lines
