"""Proof that a dry run is right: bytes and communication of each rank, against a world that computes.

The same instruments follow both. The calls must be the same, with their groups, operations, bytes, dtypes,
peers and order, and the bytes of every phase within `TOLERANCE`. What a backend allocates itself is not seen.
Ranks of the dry run must agree on the order of their calls, as those of a launch that is planned have to.
Where tokens go depends on numbers: in the world that computes routers choose as a dry run takes them to.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from mindspeed_core.discovery.entry_points import load_object
from mindspeed_core.discovery.host import DEFAULT_HOST
from mindspeed_core.feature import Patch, hookimpl
from mindspeed_megatron.instruments.call_order import OrderedCall, disagreements, waiting_for_ever
from mindspeed_testing.gloo_threads import released_when_waited
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.proof_files import flags_with_files
from mindspeed_testing.verify import Verdict
from mindspeed_testing.worlds import WorldError, run_world
from mindspeed_train.interface import batch_at

if TYPE_CHECKING:
    from mindspeed_core.feature import Feature, Scenario
    from mindspeed_core.hooks import Done
    from mindspeed_core.registry import Registry
    from mindspeed_core.run import StepResult
    from mindspeed_core.session import Session
    from mindspeed_megatron.instruments.communication import CommunicationLog
    from mindspeed_megatron.instruments.held_tensors import PhaseBytes
    from mindspeed_megatron.instruments.storage import StorageTracker

TOLERANCE = 1024
"""Bytes by which a phase may differ: single numbers that a step makes on its way."""
_STEPS = 2
_ROUTING = Patch(
    target="megatron.core.transformer.moe.router:TopKRouter.forward",
    new="mindspeed_megatron.fake.balanced:balanced_routing",
    kind="wrap",
    reason="a dry run does not know which experts numbers would choose",
)


@dataclass(frozen=True)
class MeasuredRank:
    """Bytes and communication of one rank.

    Attributes:
        phases: bytes by phase.
        calls: what the steps communicated, in order.
        groups: process groups in the order in which they were made: description and ranks.
        features: the active features.
        answers: the numbers that a dry run answered, with their places; empty in a world that computes.
    """

    phases: Mapping[str, PhaseBytes]
    calls: tuple[OrderedCall, ...]
    groups: tuple[tuple[str, tuple[int, ...]], ...]
    features: tuple[str, ...]
    answers: tuple[str, ...] = ()


class FollowedRun:
    """Extra plugin of a session of any host, which measures the rank from `start_run` to `finish_run`.

    Attributes:
        plugins: what the session needs to be followed, this plugin among it.
        measured: the rank; there is none before the run is finished.
    """

    measured: MeasuredRank

    def __init__(self, storage: StorageTracker | None = None, log: CommunicationLog | None = None) -> None:
        """Read a dry run's own instruments, or these, which follow a world that computes."""
        from mindspeed_megatron.instruments.phases import StoragePhases

        self._storage, self._log, self._first = storage, log, 0
        self.plugins: tuple[object, ...] = (self,)
        if storage is not None:
            self.plugins += (StoragePhases(storage),)

    @hookimpl(wrapper=True)
    def start_run(self, session: Session) -> Iterator[None]:
        """Begin with the steps; what was communicated before them is left out."""
        platform: Any = session.platform
        if self._storage is None:
            self._storage, self._log = platform.storage, platform.communication
        else:
            from mindspeed_megatron.instruments.host_buffers import mark_host_buffers

            mark_host_buffers(session.platform, session.instances, self._storage)
        assert self._log is not None
        self._first = len(self._log.calls)
        result: Done = yield  # type: ignore[assignment]
        return result  # type: ignore[return-value]

    @hookimpl(wrapper=True)
    def train_step(self) -> Iterator[None]:
        """Begin without garbage of the step before."""
        gc.collect()
        result: StepResult = yield  # type: ignore[assignment]
        return result  # type: ignore[return-value]

    @hookimpl(wrapper=True)
    def finish_run(self, session: Session) -> Iterator[None]:
        """Measure what the steps held and communicated."""
        assert self._storage is not None
        assert self._log is not None
        self.measured = _taken(session, self._storage, self._log, self._first)
        result: Done = yield  # type: ignore[assignment]
        return result  # type: ignore[return-value]


@contextmanager
def followed_run(platform: str) -> Iterator[FollowedRun]:
    """Follow one run on a platform; its session is opened inside, with the ``plugins`` of what is yielded."""
    from mindspeed_megatron.instruments.communication import count_communication
    from mindspeed_megatron.instruments.storage import StorageTracker

    if _is_dry(platform):
        yield FollowedRun()
        return
    with released_when_waited(), count_communication(objects=True) as log, StorageTracker() as storage:
        yield FollowedRun(storage, log)


def _taken(session: Session, storage: StorageTracker, log: CommunicationLog, first: int) -> MeasuredRank:
    platform: Any = session.platform
    return MeasuredRank(
        phases={phase.name: phase for phase in storage.report()},
        calls=tuple(map(OrderedCall.of, log.calls[first:])),
        groups=tuple((group.description, group.ranks) for group in log.groups),
        features=session.plan.names,
        answers=tuple(str(answer) for answer, _ in platform.answers.table()) if platform.dry_run else (),
    )


@dataclass(frozen=True)
class MeasureRequest:
    """The request that every rank gets; ``flags`` is the whole command line."""

    flags: Sequence[str]
    platform: str
    declarations: Sequence[str] = ()


def measure_world(
    flags: Sequence[str],
    world_size: int,
    *,
    platform: str,
    files: Sequence[str] = (),
    declarations: Sequence[str] = (),
    timeout: float = 300.0,
) -> list[MeasuredRank]:
    """Train the small GPT with ``flags`` added for two steps; return what each rank held and communicated.

    Args:
        flags: appended to `mindspeed_testing.model_flags.SMALL_GPT`.
        world_size: ranks; each is a process of its own in a dry run too.
        platform: ``fake`` for a dry run.
        files: small files behind ``{files}`` in the flags.
        declarations: ``"module:Name"`` of features that are not installed.
        timeout: seconds for the whole world.
    """
    with flags_with_files(flags, files) as filled:
        request = _request(filled, platform, declarations)
        return run_world(f"{__name__}:measure_rank", world_size, request, timeout=timeout)


def measure_layouts(
    layouts: Sequence[Sequence[str]], world_size: int, *, platform: str, timeout: float = 300.0
) -> list[list[MeasuredRank]]:
    """Train the small GPT in several layouts, one after another in the same processes.

    Args:
        layouts: flags of each, as `measure_world` takes them.
        world_size: ranks of all of them.
        platform: ``fake`` for a dry run.
        timeout: seconds for the whole world.

    Returns:
        For each layout what its ranks held and communicated.
    """
    requests = [_request(flags, platform) for flags in layouts]
    ranks = run_world(f"{__name__}:measure_rank_in_turn", world_size, requests, timeout=timeout)
    return [list(measured) for measured in zip(*ranks)]


def _request(flags: Sequence[str], platform: str, declarations: Sequence[str] = ()) -> MeasureRequest:
    steps = _STEPS + 1
    return MeasureRequest(
        training_flags(flags, steps, _registry(declarations)), platform, tuple(declarations)
    )


def measure_rank_in_turn(requests: Sequence[MeasureRequest]) -> list[MeasuredRank]:
    """Measure one rank in several layouts."""
    return [measure_rank(request) for request in requests]


def measure_rank(request: MeasureRequest) -> MeasuredRank:
    """Train one rank for two steps, followed by the instruments."""
    from mindspeed_core.activation import prepare
    from mindspeed_megatron.instruments.communication import count_communication
    from mindspeed_megatron.instruments.host_buffers import mark_host_buffers
    from mindspeed_megatron.instruments.phases import StoragePhases
    from mindspeed_megatron.instruments.storage import StorageTracker

    options: dict[str, Any] = {"registry": _registry(request.declarations), "host": DEFAULT_HOST}
    with ExitStack() as stack:
        session: Session
        if _is_dry(request.platform):
            session = prepare(request.flags, platform=request.platform, **options)
            stack.enter_context(session)
            platform: Any = session.platform
            storage, log = platform.storage, platform.communication
        else:
            storage = StorageTracker()
            session = prepare(
                request.flags, platform=request.platform, extra_plugins=(StoragePhases(storage),), **options
            )
            # Around the session, whose features may listen to waits until it closes.
            stack.enter_context(released_when_waited())
            log = stack.enter_context(count_communication(objects=True))
            stack.enter_context(session)
            mark_host_buffers(session.platform, session.instances, storage)
            session.ledger.apply([_ROUTING], owner="dry run")
            stack.enter_context(storage)
        return _measured(session, storage, log)


def _measured(session: Session, storage: StorageTracker, log: CommunicationLog) -> MeasuredRank:
    from mindspeed_train import interface

    run = interface.setup(session)
    session.call("start_run", run=run)
    first = len(log.calls)
    with _collecting_between() as collect:
        for _ in range(_STEPS):
            collect()
            session.call("train_step", run=run)
            run.iteration += 1
            run.consumed_train_samples += batch_at(run.args, run.consumed_train_samples).samples
    measured = _taken(session, storage, log, first)
    interface.teardown(session)
    return measured


@contextmanager
def _collecting_between() -> Iterator[Callable[[], object]]:
    """Let garbage in reference cycles live through a step, whenever the interpreter would collect it.

    A micro-batch may be in such a cycle. Yields the function that collects.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield gc.collect
    finally:
        if enabled:
            gc.enable()


def differences(computed: Sequence[MeasuredRank], planned: Sequence[MeasuredRank]) -> list[str]:
    """Return what a dry run has other than the world that computed, and where its own ranks disagree.

    One line each; empty when it is right.

    Args:
        computed: the ranks of the world that computed.
        planned: the same ranks of the dry run.
    """
    found = []
    for rank, (real, dry) in enumerate(zip(computed, planned)):
        for name, phase in real.phases.items():
            other = dry.phases[name]
            for what in ("begin", "peak", "end"):
                ours, theirs = getattr(other, what), getattr(phase, what)
                if abs(ours - theirs) > TOLERANCE:
                    found.append(f"rank {rank}, {name}, {what}: {ours:,} B planned, {theirs:,} B computed")
        found += _first_difference(rank, "call", list(map(str, real.calls)), list(map(str, dry.calls)))
        found += _first_difference(rank, "group", _groups_of(rank, real), _groups_of(rank, dry))
    orders = [rank.calls for rank in planned]
    return found + (disagreements(orders) or waiting_for_ever(dict(enumerate(orders))))


def _groups_of(rank: int, measured: MeasuredRank) -> list[str]:
    """Return the groups that hold a rank; it may make those of others too, which a dry run does not know."""
    return [str(group) for group in measured.groups if rank in group[1]]


def _first_difference(rank: int, what: str, real: Sequence[str], dry: Sequence[str]) -> list[str]:
    for number, (theirs, ours) in enumerate(zip_longest(real, dry, fillvalue="nothing")):
        if theirs != ours:
            return [f"rank {rank}, {what} {number}: {ours} planned, {theirs} computed"]
    return []


def verify_dry_run(
    feature: type[Feature], scenario: Scenario, *, declarations: Sequence[str] = (), timeout: float = 300.0
) -> Verdict:
    """Compare the dry run of a scenario's flags with the world that computes them.

    Args:
        feature: the declaration.
        scenario: one of its ``verify``.
        declarations: ``"module:Name"`` of declarations to use instead of what is installed.
        timeout: seconds for each of both worlds.

    Returns:
        The verdict; a world that cannot run is a failed verdict with its error, not an exception.
    """
    name = f"{scenario.name}, dry run"

    def measure(platform: str) -> list[MeasuredRank]:
        return measure_world(
            scenario.flags,
            scenario.world_size,
            platform=platform,
            files=scenario.files,
            declarations=declarations,
            timeout=timeout,
        )

    try:
        computed, planned = measure("cpu"), measure("fake")
        lines = differences(computed, planned)
    except WorldError as error:
        return Verdict(feature.name, name, passed=False, tolerance=TOLERANCE, error=str(error))
    problem = ""
    if feature.name not in planned[0].features:
        active = ", ".join(planned[0].features) or "none"
        problem = f"the feature is not active in the dry run; active: {active}"
    return Verdict(
        feature.name,
        name,
        passed=not lines and not problem,
        tolerance=TOLERANCE,
        largest_error=None,
        compared=sum(3 * len(rank.phases) + len(rank.calls) + len(rank.groups) for rank in computed),
        differences=tuple(lines),
        error=problem,
    )


def _is_dry(platform: str) -> bool:
    from mindspeed_core.registry import Registry

    return Registry.discover().platform(platform).dry_run


def why_not_dry(scenario: Scenario, *, declarations: Sequence[str] = ()) -> str:
    """Return why nothing can be said of a scenario without its data; empty where a dry run can be right.

    Args:
        scenario: one of a feature's ``verify``.
        declarations: ``"module:Name"`` of declarations to use instead of what is installed.
    """
    from mindspeed_core.activation import prepare
    from mindspeed_core.errors import UserError
    from mindspeed_core.registry import Registry

    registry = _registry(declarations) or Registry.discover()
    try:
        with flags_with_files(scenario.flags, scenario.files) as filled:
            flags = training_flags(filled, _STEPS + 1, registry)
            session = prepare(flags, host=DEFAULT_HOST, platform="fake", registry=registry)
    except UserError:
        # The dry run says what is wrong.
        return ""
    by_data = [name for name in session.plan.names if registry.features[name].cls.fake_tensors is False]
    if by_data:
        return f"{', '.join(by_data)}: what is computed depends on data"
    args = session.args
    for name in ("reset_attention_mask", "reset_position_ids"):
        if getattr(args, name, False):
            return f"--{name.replace('_', '-')}: documents end where the data says"
    if args.use_megatron_fsdp:
        return "--use-megatron-fsdp: its parts of parameters are checked by values"
    if args.variable_seq_lengths and args.pipeline_model_parallel_size > 1:
        return "--variable-seq-lengths: pipeline stages exchange lengths, which depend on data"
    return ""


def _registry(declarations: Sequence[str]) -> Registry | None:
    if not declarations:
        return None
    from mindspeed_core.registry import Registry

    return Registry.of([load_object(path) for path in declarations])
