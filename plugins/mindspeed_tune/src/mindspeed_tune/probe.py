"""The stages around one rank's step, through which its record is taken; an extra plugin of a session.

The command that is planned knows nothing of it: it builds the rank and takes its first step, which runs the
schedule over few micro-batches and layers, once for every number that the whole step follows from.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_core.feature import Patch, hookimpl
from mindspeed_megatron.instruments import communication
from mindspeed_megatron.instruments.call_order import POINT_TO_POINT
from mindspeed_megatron.instruments.code_places import CodePlace, running_code
from mindspeed_megatron.instruments.work_counter import WorkCounter
from mindspeed_megatron.unwrap import unwrap
from mindspeed_tune import described_run, layer_kinds, schedules
from mindspeed_tune.allocation_events import AllocationEvents
from mindspeed_tune.layout import Layout
from mindspeed_tune.one_rank_groups import only_own_groups
from mindspeed_tune.record import Answer, Call, Peak, RankRecord, Run, Update
from mindspeed_tune.record_parts import FRAMES, backend_of, groups_of, peak_of, ratios_of
from mindspeed_tune.relief import reliefs

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from mindspeed_core.run import OptimizerStep, StepResult
    from mindspeed_core.run import Run as TrainingRun
    from mindspeed_core.session import Session

_LARGEST = 5
_BETWEEN = (
    *(str(Path(file).parent) for file in (torch.__file__, communication.__file__, __file__)),
    contextlib.__file__,
    "<",
)
"""Code between a call and its record."""
_SHARDED = ("DATA_PARALLEL", "DP_CP")


@dataclass(frozen=True)
class ProbeOptions:
    """Parts of a step that are run.

    Attributes:
        exact_layers: all layers instead of one and two of each kind.
        exact_microbatches: all micro-batches instead of one and two.
        only_order: one pass is enough: the rank takes part in the order check alone.
        reliefs: ask what features that are not active would keep less.
    """

    exact_layers: bool = False
    exact_microbatches: bool = False
    only_order: bool = False
    reliefs: bool = True


class Probe:
    """Takes the record of a rank, and delivers it at the end of the first step."""

    def __init__(self, options: ProbeOptions, deliver: Callable[[RankRecord], None]) -> None:
        """Take a record as ``options`` say and hand it to ``deliver``, which need not return."""
        self.options, self.deliver = options, deliver
        self._session: Any = None
        self._run: Any = None
        self._work = WorkCounter()
        self._phases: list[str] = []
        self._stacks: list[tuple[CodePlace, ...]] = []
        self._runs: list[tuple[str, dict[str, Any]]] = []
        self._update: dict[str, Any] = {}
        self._static: Mapping[str, float] = {}
        self._microbatches = 0
        self._skipped: list[Any] = []
        self._backwards = 0
        self._direction = ""

    @hookimpl(wrapper=True)
    def build_process_groups(self, session: Session) -> Iterator[None]:
        """Make the groups of this rank alone."""
        with only_own_groups(session.place_in_world()[0]):
            result: ProcessGroupCollection = yield
        return result

    @hookimpl(wrapper=True)
    def get_forward_backward(self) -> Iterator[None]:
        """Put the schedule's passes in the place of the whole schedule."""
        schedule: Callable[..., Any] = yield  # type: ignore[assignment]

        @functools.wraps(schedule)
        def passes(*args: Any, **options: Any) -> Any:
            if self._run is None or options.get("forward_only") or self._runs:
                return schedule(*args, **options)
            return self._passes(functools.partial(schedule, *args), options)

        return passes  # type: ignore[return-value]

    @hookimpl(wrapper=True)
    def train_step(self, session: Any, run: TrainingRun) -> Iterator[None]:
        """Take the first step under observation, and deliver its record."""
        self._session, self._run = session, run
        storage = session.platform.storage
        storage.mark_run(run)
        storage.end_phase()
        self._static = dict(storage.now())
        log = session.platform.communication
        log.calls = _Observed(log.calls, self._seen)
        backward = Patch(
            "megatron.core.pipeline_parallel.schedules:backward_step",
            self._counting_backward,
            "the record tells forward from backward",
            kind="wrap",
        )
        session.ledger.apply([backward], owner="plan")
        with self._work, session.platform.shortcut(self._work):
            result: StepResult = yield  # type: ignore[assignment]
        storage.mark_run(run)
        storage.end_phase()
        self._update["after"] = dict(storage.now())
        self._update["calls"] = (self._update.get("calls", len(log.calls)), len(log.calls))
        self.deliver(self._record())
        return result  # type: ignore[return-value]

    @hookimpl(wrapper=True)
    def forward_step(self, run: TrainingRun) -> Iterator[None]:
        """Count a forward pass."""
        chunk = run.context.vp_stage or 0
        self._enter(schedules.FORWARD, chunk, run.context.microbatch)
        result: Any = yield
        return result

    @hookimpl(wrapper=True)
    def finalize_gradients(self, model: list[Any]) -> Iterator[None]:
        """Count the exchange of gradients, also of layers that did not run."""
        self._leave("gradients")
        _gradients_ready(model, self._skipped)
        result: Any = yield
        self._leave("losses")
        return result

    @hookimpl(wrapper=True)
    def optimizer_step(self, session: Any, run: TrainingRun) -> Iterator[None]:
        """Count the update."""
        storage = session.platform.storage
        storage.mark_run(run)
        storage.phase("update")
        self._leave("update")
        self._update["calls"] = len(session.platform.communication.calls)
        result: OptimizerStep = yield  # type: ignore[assignment]
        storage.mark_run(run)
        storage.end_phase()
        self._leave("losses")
        return result  # type: ignore[return-value]

    def _passes(self, schedule: Callable[..., Any], options: dict[str, Any]) -> Any:
        """Run the schedule over every number of micro-batches and layers that is wanted."""
        from mindspeed_megatron.schedule import restart_microbatches

        run, storage = self._run, self._session.platform.storage
        log, result = self._session.platform.communication, None
        self._microbatches = options["num_microbatches"]
        chunks = [unwrap(chunk) for chunk in run.model]
        for number, (microbatches, layers) in enumerate(self._wanted(chunks)):
            if number:
                for chunk in run.model:
                    chunk.zero_grad_buffer()
                run.optimizer.zero_grad()
            name = f"pass {number}"
            storage.phase(name)
            taken: dict[str, Any] = {"microbatches": microbatches, "layers": layers, "steps": []}
            self._runs.append((name, taken))
            self._backwards, first = 0, len(log.calls)
            before, self._work.work = self._work.work, {}
            events = None if number else AllocationEvents()
            with layer_kinds.only_layers(run.config, chunks, layers) as self._skipped:
                restart_microbatches(run)
                self._leave("between")
                _gather_parameters(run.model)
                with nullcontext() if events is None else storage.watched_by(events):
                    result = schedule(**{**options, "num_microbatches": microbatches})
            if events is not None:
                taken["events"] = events
            self._leave("losses")
            storage.mark_run(run)
            storage.end_phase()
            taken["work"], self._work.work = self._work.work, before
            taken["calls"] = (first, len(log.calls))
        return result

    def _wanted(self, chunks: list[Any]) -> list[tuple[int, dict[str, int]]]:
        """Return micro-batches and layers of every pass; the first one is compared with other ranks'."""
        config = self._run.config
        reason = layer_kinds.exact_because(config, chunks)
        wanted: list[dict[str, int]] = [{}]
        if not self.options.exact_layers and not reason:
            wanted = layer_kinds.variants(layer_kinds.counts(config, chunks))
        first, *others = wanted
        numbers = [self._microbatches]
        if not self.options.exact_microbatches:
            layout, stages = described_run.layout_of(self._run), layer_kinds.stages_of(config, len(chunks))
            stage = layout.place(self._session.place_in_world()[0])["pp"]
            size = described_run.group_size(config)
            numbers = schedules.numbers(
                layout, stages, stage, self._microbatches, size, all_layers=len(wanted) == 1
            )
        found = [(number, first) for number in numbers] + [(min(numbers), layers) for layers in others]
        return found[:1] if self.options.only_order else found

    def _counting_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward_step(*args: Any, **options: Any) -> Any:
            taken = self._runs[-1][1] if self._runs else {"microbatches": 1}
            layout = described_run.layout_of(self._run)
            size = described_run.group_size(self._run.config)
            stage = layout.place(self._session.place_in_world()[0])["pp"]
            backwards = _backwards(layout, stage, taken["microbatches"], size)
            _, chunk, microbatch = backwards[self._backwards % len(backwards)]
            self._backwards += 1
            self._enter(schedules.BACKWARD, chunk, microbatch)
            try:
                return original(*args, **options)
            finally:
                self._leave("between")

        return backward_step

    def _enter(self, direction: str, chunk: int, microbatch: int) -> None:
        self._direction = direction
        self._work.key = f"{chunk} {direction}"
        if self._runs:
            self._runs[-1][1]["steps"].append((direction, chunk, microbatch))

    def _leave(self, phase: str) -> None:
        self._direction = phase
        self._work.key = "update" if phase == "update" else ""

    def _seen(self, call: Any) -> None:
        """Note the phase and the code of a call."""
        self._phases.append(self._direction)
        self._stacks.append(running_code(_BETWEEN, FRAMES))

    def _record(self) -> RankRecord:
        session, run = self._session, self._run
        log, storage = session.platform.communication, session.platform.storage
        first_seen = len(log.calls) - len(self._phases)
        groups, index = groups_of(log)
        report = {phase.name: phase for phase in storage.report(_LARGEST)}
        layout = described_run.layout_of(run)
        stage = layout.place(session.place_in_world()[0])["pp"]
        size = described_run.group_size(run.config)

        def calls(span: tuple[int, int]) -> tuple[Call, ...]:
            return tuple(self._call(log.calls[number], index, number - first_seen) for number in range(*span))

        runs = tuple(
            Run(
                microbatches=taken["microbatches"],
                layers=taken["layers"],
                in_flight=schedules.in_flight(layout, stage, taken["microbatches"], size),
                peak=peak_of(report[name]),
                calls=calls(taken["calls"]),
                work={key: dict(counts) for key, counts in taken["work"].items() if key[0].isdigit()},
                steps=tuple(taken["steps"]),
            )
            for name, taken in self._runs
        )
        update = Update(
            peak=peak_of(report["update"]) if "update" in report else Peak({}),
            after=self._update["after"],
            calls=calls(self._update["calls"]),
            work=dict(self._work.work.get("update", {})),
        )
        return RankRecord(
            rank=session.place_in_world()[0],
            layout=layout,
            stages=layer_kinds.stages_of(run.config, len(run.model)),
            microbatches=self._microbatches,
            static=self._static,
            runs=runs,
            update=update,
            groups=groups,
            answers=tuple(
                Answer(answer.file, answer.line, str(answer.value), count)
                for answer, count in session.platform.answers.table()
            ),
            incomplete=described_run.incomplete(session),
            sizes=described_run.sizes(run),
            flags=described_run.flags(run),
            features=tuple(session.plan.names),
            host_bytes=storage.host,
            cost=ratios_of(self._runs[0][1]["events"]),
            backend=backend_of(log, session.platform),
            reliefs=reliefs(session, run) if self.options.reliefs and not self.options.only_order else (),
        )

    def _call(self, call: Any, index: Mapping[Any, int], seen: int) -> Call:
        phase = self._phases[seen]
        sharded = any(word in call.group for word in _SHARDED)
        if call.operation in POINT_TO_POINT:
            phase = "messages"
        elif sharded and phase in (schedules.FORWARD, schedules.BACKWARD, "between"):
            # Overlapped with the passes, it belongs to what it overlaps with them.
            phase = "update" if "gather" in call.operation else "gradients"
        return Call(
            group=index[call.group, call.ranks],
            operation=call.operation,
            bytes=call.tensor_bytes,
            dtype=call.dtype,
            peer=call.peer if call.operation in POINT_TO_POINT else None,
            phase=phase,
            stack=tuple(map(str, self._stacks[seen])),
            launch_event=call.launch_event,
            wait_event=call.wait_event,
            batch=call.batch,
            creates=call.creates,
        )


@functools.lru_cache(maxsize=8)
def _backwards(
    layout: Layout, stage: int, microbatches: int, group_size: int | None
) -> tuple[schedules.Step, ...]:
    """Return the backward passes of a stage, in order."""
    order = schedules.order(layout, stage, microbatches, group_size)
    return tuple(step for step in order if step[0] == schedules.BACKWARD)


class _Observed(list[Any]):
    """A list that tells of everything appended to it."""

    def __init__(self, values: Any, seen: Callable[[Any], None]) -> None:
        super().__init__(values)
        self._tell = seen

    def append(self, value: Any) -> None:
        super().append(value)
        self._tell(value)


def _gather_parameters(model: list[Any]) -> None:
    """Gather parameters that are gathered behind forward passes, those of layers that will not run as well.

    Every step of a training does so but its first one.
    """
    for chunk in model:
        if not getattr(chunk, "use_forward_hook", False):
            continue
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            group.param_gather_dispatched = False
            group.start_param_sync()
            group.finish_param_sync(skip_next_bucket_dispatch=True)


def _gradients_ready(model: list[Any], skipped: list[Any]) -> None:
    """Let overlapped reductions begin that wait for parameters of layers that did not run."""
    left = {id(parameter) for parameter in skipped}
    for chunk in model if left else ():
        if not getattr(getattr(chunk, "ddp_config", None), "overlap_grad_reduce", False):
            continue
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            if group.grad_reduce_handle is not None:
                # A pipeline's later stages begin their reductions together, and wait for no parameter.
                continue
            # megatron-core before 0.16 keeps a set of the parameters that are ready, and no counts.
            counts = getattr(group, "per_param_grad_ready_counts", None)
            ready = group.params_with_grad if counts is None else counts
            for parameter in group.params:
                if id(parameter) in left and parameter not in ready:
                    group.register_grad_ready(parameter)
