"""The schedule as megatron-core calls it: one function for training and evaluation."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mindspeed_core.errors import UserError
from mindspeed_megatron.saved_weights import keep_saved_weights
from mindspeed_megatron.unwrap import chunks_of
from mindspeed_pp.asked import FLAG, WAVES, message_timeout
from mindspeed_pp.half_precision import OWNER, convert_at_ends
from mindspeed_pp.indexed_batches import IndexedBatches
from mindspeed_pp.likeness import compare
from mindspeed_pp.lint import Findings, lint
from mindspeed_pp.mail import DOWN, UP, Mail, StuckError, warm_up
from mindspeed_pp.named import functions_of
from mindspeed_pp.plan import Plan, without_pairs
from mindspeed_pp.positions import Positions, announcer, described
from mindspeed_pp.profiling import Profiling
from mindspeed_pp.reductions import finalize
from mindspeed_pp.schedule import Schedule
from mindspeed_pp.shape_table import shapes_of_step, sizes_of_step
from mindspeed_pp.step import Step
from mindspeed_pp.step_parts import Combined, Parts
from mindspeed_pp.swaps import HostCopies
from mindspeed_pp.uneven_microbatches import regrouped, weighing_of_step
from mindspeed_pp.weight_gradients import WeightGradients

if TYPE_CHECKING:
    from mindspeed_core.run import Run
    from mindspeed_core.session import Session

logger = logging.getLogger("mindspeed_core")

AHEAD = 2
"""Receives that each channel keeps posted, or more where the schedule needs them."""


@dataclass
class EngineState:
    """State of the engine between steps.

    Attributes:
        schedules: made so far, by number of micro-batches and whether they are of forward passes alone.
        warm: channels that have carried something.
        compared: digests of schedules that the ranks of the pipeline have found alike.
        most_alive: most micro-batch-chunks alive in the last step.
        most_posted: most receives posted at once in the last step.
        took_over: it was said that another schedule runs batches that are too small for the plan's.
        executed: name of the schedule of the last step.
        copies: to the host and back, once something went there.
        combined: runs the two passes of a pair side by side; None one after the other.
        plan: that took over after measuring; None where the first one holds.
        positions: how far the ranks of this pipeline are; None before the first batch, and in dry runs.
    """

    schedules: dict[tuple[int, bool], tuple[Schedule, Findings]] = field(default_factory=dict)
    warm: set[Any] = field(default_factory=set)
    compared: set[str] = field(default_factory=set)
    most_alive: int = 0
    most_posted: int = 0
    took_over: bool = False
    executed: str = ""
    copies: HostCopies | None = None
    combined: Combined | None = None
    plan: Plan | None = None
    positions: Positions | None = None


class Engine:
    """A schedule with megatron-core's forward-backward signature."""

    def __init__(self, run: Run, args: Namespace, config: Any, pg: Any, plan: Plan) -> None:
        """Prepare the schedule of a run.

        Args:
            run: the run in progress.
            args: the arguments.
            config: megatron-core's configuration of the model.
            pg: the process groups.
            plan: which schedule, on which placement.
        """
        self._run, self._args, self._config, self._pg, self._plan = run, args, config, pg, plan

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        force_all_reduce: bool | None = False,
        **_: Any,
    ) -> list[Any]:
        """Run one batch; see megatron-core's ``get_forward_backward_func``.

        Returns:
            The reports of the micro-batches on the rank of the last stage, elsewhere nothing.
        """
        session, config = self._run.session, self._config
        state = session.state(EngineState)
        read = micro_batch_size or self._args.micro_batch_size
        weighing = None
        if self._plan.sizes and not forward_only:
            weighing = weighing_of_step(self._args, self._plan.sizes, num_microbatches * read)
            num_microbatches = len(weighing.sizes)
        schedule, findings = self._schedule(num_microbatches, forward_only, state)
        device = self._run.dist.device
        groups = {name: session.groups[name] for name in (UP, DOWN)}
        rank = self._pg.pp.rank()
        self._begin(schedule, rank, groups, state)
        models = chunks_of(model)
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        if weighing is not None:
            iterators = [None if i is None else regrouped(i, weighing.sizes, read) for i in iterators]
        batches = [None if each is None else IndexedBatches(each) for each in iterators]
        sizes = {"seq_length": seq_length, "micro_batch_size": micro_batch_size}
        args = Namespace(**(vars(self._args) | {k: v for k, v in sizes.items() if v is not None}))
        if config.variable_seq_lengths:
            shapes = shapes_of_step(
                self._run, args, config, sizes_of_step(self._run, self._pg, schedule, batches)
            )
        elif weighing is not None:
            listed = [(size, args.seq_length) for size in weighing.sizes]
            shapes = shapes_of_step(self._run, args, config, listed)
        else:
            shapes = self._shapes(args)
        ahead = {channel: max(AHEAD, depth) for channel, depth in findings.look_ahead.items()}
        recorder = None
        if not forward_only:
            recorder = session.state(Profiling).recorder(self._args, schedule, session.platform)
        parts = Parts(
            run=self._run,
            config=config,
            pg=self._pg,
            schedule=schedule,
            rank=rank,
            models=models,
            batches=batches,
            forward_step_func=forward_step_func,
            mail=Mail(schedule, rank, groups, shapes, device, ahead),
            weight_gradients=session.state(WeightGradients),
            device=device,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            weighing=weighing,
            announce=announcer(state.positions),
            recorder=recorder,
            copies=lambda: _copies(state, session, models),
            named=functions_of(schedule),
            combined=None if forward_only else state.combined,
        )
        self._check_chunks(parts)
        convert_at_ends(session, models, schedule.placement, rank)
        step = Step(parts)
        moved = state.copies.moved if state.copies is not None else 0
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        try:
            step.run()
        except StuckError as error:
            where = described(schedule, rank, step.position)
            raise _stuck(schedule, rank, where, error, state, parts.mail.reached()) from error
        if not forward_only:
            finalize(parts, step.tokens, force_all_reduce=force_all_reduce)
            state.most_alive, state.most_posted = step.most_alive, parts.mail.most_posted
            state.executed = schedule.name
            if schedule.swapped:
                now = state.copies.moved if state.copies is not None else 0
                self._run.metrics.add("pipeline bytes to the host", float(now - moved), "max")
        if recorder is not None:
            plan = session.state(Profiling).add(recorder, self._run, self._args, self._pg, self._held(state))
            if plan is not None:
                state.plan, state.schedules = plan, {}
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return step.reports

    def _begin(self, schedule: Schedule, rank: int, groups: dict[str, Any], state: EngineState) -> None:
        session, device = self._run.session, self._run.dist.device
        if session.platform.dry_run:
            # No rank waits for another one.
            warm_up(schedule, rank, groups, device, state.warm)
            return
        ranks = dist.get_process_group_ranks(self._pg.pp)
        if state.positions is None:
            state.positions = Positions(ranks, rank, message_timeout(self._args).total_seconds())
            state.positions.start()
            session.at_close(lambda: _end(state))
        state.positions.begin(schedule)
        try:
            if schedule.digest not in state.compared:
                compare(schedule, rank, ranks, message_timeout(self._args))
                state.compared.add(schedule.digest)
            warm_up(schedule, rank, groups, device, state.warm)
        except StuckError as error:
            raise _stuck(schedule, rank, "before its first item", error, state, {}) from error

    def pair_with(self, combined: Combined) -> None:
        """Let the forward and backward pass of a pair run side by side.

        Args:
            combined: called with two functions of no arguments, a forward and a backward pass of different
                micro-batches. It calls both, from whatever threads and in turns as it likes, and returns when
                both are done. What they wait for is there, and what they make is sent afterwards.
        """
        self._run.session.state(EngineState).combined = combined

    def _held(self, state: EngineState) -> Plan:
        return state.plan or self._plan

    def _schedule(
        self, microbatches: int, forward_only: bool, state: EngineState
    ) -> tuple[Schedule, Findings]:
        key = microbatches, forward_only
        if key not in state.schedules:
            plan = self._held(state)
            schedule = plan.schedule(microbatches)
            # A limit of memory does not hold for a small batch that another schedule takes over.
            findings = lint(schedule, None if schedule.name == WAVES else plan.limit)
            refused = plan.refusal(microbatches)
            if refused and not forward_only and not state.took_over and self._run.dist.rank == 0:
                state.took_over = True
                logger.warning(
                    "%s: %s; schedule %s takes over for such batches", FLAG, refused, schedule.name
                )
            lone = without_pairs(schedule) if state.combined is not None and not refused else ""
            if lone and not forward_only:
                raise UserError(lone)
            state.schedules[key] = (schedule.forward_only() if forward_only else schedule), findings
        return state.schedules[key]

    def _shapes(self, args: Namespace) -> Callable[[int], Any]:
        schema = self._run.session.call("boundary_schema", args=args, config=self._config)
        return lambda microbatch: schema.tensors

    def _check_chunks(self, parts: Parts) -> None:
        held = len(parts.schedule.placement.held[parts.rank])
        if len(parts.models) != held:
            raise UserError(
                f"--pipeline-schedule {parts.schedule.name}: this rank has {len(parts.models)} model chunks "
                f"and the schedule {held}; build the model for the places of session.places()"
            )


def _stuck(
    schedule: Schedule,
    rank: int,
    where: str,
    error: StuckError,
    state: EngineState,
    first_unfinished: dict[int, int],
) -> UserError:
    """Return the error of a wait that ended without its message; names who all wait for."""
    assert state.positions is not None
    cause = str(error.__cause__).strip().partition("\n")[0]
    return UserError(
        f"--pipeline-schedule {schedule.name}: pipeline rank {rank} waited {where} for {error}; "
        f"{state.positions.finding(first_unfinished)}. Look at the output of that rank; the wait ended "
        f"with: {cause}"
    )


def _copies(state: EngineState, session: Session, models: Sequence[Any]) -> HostCopies:
    if state.copies is None:
        state.copies = HostCopies(session.platform)
        # From now on hooks take what autograd saves.
        keep_saved_weights(session, OWNER, models)
    return state.copies


def _end(state: EngineState) -> None:
    if state.positions is not None:
        state.positions.stop()
    state.positions = None
