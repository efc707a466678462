"""One side of a proof: a short training in a world, with everything worth comparing recorded.

The steps that are compared run undisturbed; memory and communication are measured on a further step, and time
on further ones still, so that no measurement shows in another.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mindspeed_core.discovery.entry_points import load_object
from mindspeed_core.discovery.host import DEFAULT_HOST
from mindspeed_megatron.backend_contracts.hccl import HCCL
from mindspeed_megatron.backend_contracts.nccl import NCCL
from mindspeed_megatron.instruments.call_order import OrderedCall, waiting_for_ever
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.proof_files import flags_with_files
from mindspeed_testing.step_probe import Measured, StepProbe, Steps, measure
from mindspeed_testing.worlds import run_world

if TYPE_CHECKING:
    from mindspeed_core.registry import Registry
    from mindspeed_core.run import Run
    from mindspeed_megatron.backend_contracts.contract import BackendContract
    from mindspeed_megatron.instruments.communication import Total
    from mindspeed_testing.canonical import CanonicalState
    from mindspeed_testing.saved_state import SavedState


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint in the middle of a training: the side saves it, or begins with it.

    Attributes:
        folder: where it lies.
        step: the step after which it is saved.
        load: begin with it instead of saving it.
    """

    folder: str
    step: int
    load: bool = False

    @property
    def flags(self) -> tuple[str, ...]:
        """Return the flags of the side."""
        if self.load:
            return ("--load", self.folder, "--exit-on-missing-checkpoint")
        return ("--save", self.folder)


@dataclass(frozen=True)
class SideRequest:
    """The request that every rank of a side gets, as in `train_side`; ``flags`` is the whole command line."""

    flags: Sequence[str]
    steps: int
    initial: CanonicalState | None = None
    gradients: bool = True
    measure: bool = False
    timed_steps: int = 0
    declarations: Sequence[str] = ()
    probes: Sequence[str] = ()
    platform: str | None = None
    extra_parameters: Sequence[str] = ()
    feature_state: bool = False
    optimizer_state: bool = False
    checkpoint: Checkpoint | None = None
    contracts: Sequence[BackendContract] = ()


@dataclass(frozen=True)
class RankRecord:
    """The result of one rank; states exist on rank 0 only.

    ``recorded`` is what features recorded with ``run.metrics`` in the compared steps, on this rank alone.
    """

    features: tuple[str, ...]
    layout: str
    losses: tuple[Mapping[str, float], ...]
    grad_norms: tuple[float | None, ...]
    initial: CanonicalState | None
    parameters: CanonicalState | None
    gradients: tuple[CanonicalState, ...]
    learning_rates: tuple[tuple[float, ...], ...]
    saved: SavedState | None
    measured: Measured
    step_seconds: tuple[float, ...]
    calls: tuple[OrderedCall, ...] = ()
    platform: str = ""
    warnings: tuple[str, ...] = ()
    recorded: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SideResult:
    """The result of a side, all ranks together.

    Attributes:
        features: the active features.
        layout: ranks and sizes of the parallel dimensions, for reports.
        losses: series of each reported loss, one number per compared step.
        grad_norms: norm of each compared step's gradient.
        initial: the parameters it started from.
        parameters: the parameters after the last compared step.
        gradients: the gradients of each compared step, after reduction and before clipping.
        learning_rates: the different learning rates of all parameter groups, at each compared step.
        saved: state of features (and of the optimizer) after the last compared step, where it was asked for.
        measures: ``peak_bytes`` (forward and backward), ``forward_bytes`` (most alive right after a forward
            pass), ``step_peak_bytes`` (with the update), ``host_bytes`` (buffers for copies to the device,
            alive after the step), ``host_buffers`` (made in the step), ``parameter_bytes``,
            ``gradient_bytes``, ``optimizer_bytes`` and ``collective_calls`` (largest of all ranks),
            ``sent_bytes`` (sum over ranks), ``step_seconds`` (median).
        communication: per rank, totals by operation and group.
        metrics: what features recorded with ``run.metrics`` in the measured step, reduced.
        blocked: ranks that a device's backend would never let go on, a line each.
        platform: name of the platform that it ran on.
        warnings: logged on rank 0 while the run was set up, and its checkpoint loaded.
    """

    features: tuple[str, ...]
    layout: str
    losses: Mapping[str, tuple[float, ...]]
    grad_norms: tuple[float | None, ...]
    initial: CanonicalState
    parameters: CanonicalState
    gradients: tuple[CanonicalState, ...]
    learning_rates: tuple[tuple[float, ...], ...]
    saved: SavedState | None
    measures: Mapping[str, float]
    communication: tuple[Mapping[tuple[str, str], Total], ...]
    metrics: Mapping[str, float]
    blocked: tuple[str, ...] = ()
    platform: str = ""
    warnings: tuple[str, ...] = ()


def train_side(
    flags: Sequence[str] = (),
    world_size: int = 1,
    steps: int = 3,
    *,
    initial: CanonicalState | None = None,
    gradients: bool = True,
    measure: bool = False,
    timed_steps: int = 0,
    declarations: Sequence[str] = (),
    probes: Sequence[str] = (),
    platform: str | None = None,
    files: Sequence[str] = (),
    extra_parameters: Sequence[str] = (),
    feature_state: bool = False,
    optimizer_state: bool = False,
    checkpoint: Checkpoint | None = None,
    contracts: Sequence[BackendContract] = (HCCL["910B"], NCCL),
    timeout: float = 300.0,
) -> SideResult:
    """Train the small GPT with ``flags`` added, in a world of its own.

    Args:
        flags: appended to `mindspeed_testing.model_flags.SMALL_GPT`.
        world_size: ranks.
        steps: compared steps.
        initial: parameters to start from, another side's ``initial``; None keeps those the model is built
            with.
        gradients: record the gradients of every compared step.
        measure: measure memory and communication on one more step.
        timed_steps: further steps whose wall time is taken.
        declarations: ``"module:Name"`` of features that are not installed; replaces the installed ones.
        probes: ``"module:Class"`` of objects with hook implementations, registered outermost.
        platform: the platform, None to let the flags decide.
        files: small files behind ``{files}`` in the flags, see `mindspeed_core.feature.Scenario`.
        extra_parameters: patterns of parameters that ``initial`` may lack.
        feature_state: record the state of features after the last compared step.
        optimizer_state: record the state of features and optimizer after the last compared step.
        checkpoint: where the compared steps begin; the steps up to there are trained, or loaded.
        contracts: backends whose rules every call must keep, whatever backend serves it; none where time is
            taken.
        timeout: seconds for the whole side.

    Raises:
        WorldError: a rank failed; the message shows its error.
    """
    if timed_steps > _TIMED_STEPS_AT_MOST:
        raise ValueError(f"timed_steps {timed_steps}: at most {_TIMED_STEPS_AT_MOST}")
    # The same on every side, whatever it measures: schedules depend on the length of a run.
    length = steps + 1 + _TIMED_STEPS_AT_MOST + (checkpoint.step if checkpoint else 0)
    with flags_with_files((*flags, *(checkpoint.flags if checkpoint else ())), files) as filled:
        request = SideRequest(
            training_flags(filled, length, _registry(declarations)),
            steps,
            initial,
            gradients,
            measure,
            timed_steps,
            declarations,
            probes,
            platform,
            extra_parameters,
            feature_state,
            optimizer_state,
            checkpoint,
            () if timed_steps else contracts,
        )
        ranks: list[RankRecord] = run_world(f"{__name__}:train_rank", world_size, request, timeout=timeout)
    return joined_ranks(ranks)


_TIMED_STEPS_AT_MOST = 20


def train_rank(request: SideRequest) -> RankRecord:
    """Train one rank of a side."""
    from mindspeed_core.activation import activate
    from mindspeed_megatron.instruments.communication import CommunicationLog, count_communication
    from mindspeed_megatron.instruments.host_buffers import HostBuffers
    from mindspeed_testing.canonical import canonical_parameters, load_canonical
    from mindspeed_testing.saved_state import saved_state
    from mindspeed_train import interface

    probe = StepProbe()
    rules, log = ExitStack(), CommunicationLog()
    if request.contracts:
        log = rules.enter_context(count_communication(objects=True, contracts=request.contracts))
    session = activate(
        request.flags,
        platform=request.platform,
        registry=_registry(request.declarations),
        extra_plugins=(probe, *(load_object(path)() for path in request.probes)),
        host=DEFAULT_HOST,
    )
    try:
        buffers = HostBuffers(session.platform, session.instances)
        with _logged_warnings() as warnings:
            run = interface.setup(session)
        if request.initial is not None:
            load_canonical(run, request.initial, may_lack=request.extra_parameters)
        session.call("start_run", run=run)
        steps = Steps(run)
        initial = request.initial or canonical_parameters(run)
        _reach(steps, request.checkpoint)
        probe.begin(request.gradients)
        results = [steps.once() for _ in range(request.steps)]
        probe.end()
        recorded = {name: value for name, (_, value, _) in run.metrics.local().items()}
        saved = None
        parameters = canonical_parameters(run)
        if request.feature_state or request.optimizer_state:
            saved = saved_state(run, with_optimizer=request.optimizer_state)
        measured = measure(run, steps, probe, buffers) if request.measure else Measured()
        seconds = tuple(steps.once().seconds for _ in range(request.timed_steps))
        record = RankRecord(
            features=session.plan.names,
            layout=describe_layout(run),
            losses=tuple(result.losses for result in results),
            grad_norms=tuple(result.grad_norm for result in results),
            initial=initial if run.dist.rank == 0 else None,
            parameters=parameters,
            gradients=tuple(probe.gradients),
            learning_rates=tuple(probe.learning_rates),
            saved=saved,
            measured=measured,
            step_seconds=seconds,
            calls=tuple(map(OrderedCall.of, log.calls)),
            platform=session.platform.name,
            warnings=tuple(warnings),
            recorded=recorded,
        )
        interface.teardown(session)
        return record
    finally:
        session.close()
        rules.close()


@contextmanager
def _logged_warnings() -> Iterator[list[str]]:
    """Collect the texts of warnings that the project logs in this block."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mindspeed_core")
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


def _reach(steps: Steps, checkpoint: Checkpoint | None) -> None:
    """Train up to the checkpoint and save it, or see that it was loaded."""
    if checkpoint is None:
        return
    if not checkpoint.load:
        for _ in range(checkpoint.step):
            steps.once()
        steps.save()
    elif steps.run.iteration != checkpoint.step:
        raise RuntimeError(
            f"the run stands at step {steps.run.iteration} after loading a checkpoint of step "
            f"{checkpoint.step}; a proof that resumes loads model, optimizer and counters"
        )


def describe_layout(run: Run) -> str:
    """Return ranks and layout of a run in words: ``"4 ranks (tp 2, pp 2, sequence parallel)"``."""
    from mindspeed_train.interface import layout

    args = run.args
    parts = [f"{name} {size}" for name, size in layout(run).items() if size > 1]
    kinds = (
        ("sequence_parallel", "sequence parallel"),
        ("use_distributed_optimizer", "distributed optimizer"),
        ("overlap_param_gather", "overlapped parameter gather"),
        ("use_torch_fsdp2", "FSDP2"),
        ("use_megatron_fsdp", "Megatron-FSDP"),
    )
    parts += [words for name, words in kinds if getattr(args, name, False)]
    count = f"{run.dist.world_size} rank{'s' if run.dist.world_size > 1 else ''}"
    return f"{count} ({', '.join(parts)})" if parts else count


def joined_ranks(ranks: Sequence[RankRecord]) -> SideResult:
    """Return the result of a side from the records of its ranks, in rank order."""
    first = ranks[0]
    assert first.initial is not None
    assert first.parameters is not None
    measures: dict[str, float] = {}
    for name in first.measured.measures:
        values = [rank.measured.measures[name] for rank in ranks]
        measures[name] = sum(values) if name == "sent_bytes" else max(values)
    if first.step_seconds:
        measures["step_seconds"] = statistics.median(first.step_seconds)
    names = sorted({name for step in first.losses for name in step})
    return SideResult(
        features=first.features,
        layout=first.layout,
        losses={name: tuple(step[name] for step in first.losses if name in step) for name in names},
        grad_norms=first.grad_norms,
        initial=first.initial,
        parameters=first.parameters,
        gradients=first.gradients,
        learning_rates=tuple(
            tuple(sorted({rate for rates in step for rate in rates}))
            for step in zip(*(rank.learning_rates for rank in ranks))
        ),
        saved=first.saved,
        measures=measures,
        communication=tuple(rank.measured.communication for rank in ranks),
        metrics=first.measured.metrics,
        blocked=tuple(waiting_for_ever({rank: record.calls for rank, record in enumerate(ranks)})),
        platform=first.platform,
        warnings=first.warnings,
    )


def _registry(declarations: Sequence[str]) -> Registry | None:
    if not declarations:
        return None
    from mindspeed_core.registry import Registry

    return Registry.of([load_object(path) for path in declarations])
