"""The platform ``fake``: one rank of any launch on any machine, in shapes alone.

`DryRun` is what dry runs of every device have in common; `FakePlatform` is the one that behaves like the cpu
platform and carries its emulation of ``torch.cuda``.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar

from mindspeed_core.errors import ArgumentError
from mindspeed_core.feature import Patch, hookimpl
from mindspeed_core.platforms.cpu import CpuPlatform
from mindspeed_core.platforms.machine import numbered_variable
from mindspeed_core.platforms.platform import Availability, MemoryFigure, OpeningSession, Platform, Position
from mindspeed_megatron.fake.world import world_patches
from mindspeed_megatron.instruments.phases import StoragePhases

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.module import MegatronModule

    from mindspeed_core.run import Run
    from mindspeed_megatron.backend_contracts import BackendContract
    from mindspeed_megatron.fake.answers import Answers
    from mindspeed_megatron.fake.shortcut import Shortcut
    from mindspeed_megatron.fake.tensors import AnsweringMode
    from mindspeed_megatron.instruments.communication import CommunicationLog
    from mindspeed_megatron.instruments.work_counter import WorkCounter

_WORLD = "--fake-world-size"
_RANK = "--fake-rank"


def fake_position(args: Namespace, environment: Mapping[str, str] | None = None) -> Position:
    """Return rank, world size and local rank of a dry run.

    A flag and the launcher's variable that it stands for may both be given where they say the same.

    Raises:
        ArgumentError: a flag contradicts the launcher's variable, or the rank is outside of the world.
    """
    env = os.environ if environment is None else environment
    world_size = _one_of(_WORLD, getattr(args, "fake_world_size", None), "WORLD_SIZE", env, 1)
    rank = _one_of(_RANK, getattr(args, "fake_rank", None), "RANK", env, 0)
    if world_size < 1:
        raise ArgumentError(
            _WORLD, world_size, "a world has at least one rank", "give the size of the launch"
        )
    if not 0 <= rank < world_size:
        reason = f"is outside of a world of {world_size} rank{'s' if world_size > 1 else ''}"
        way_out = f"use 0 to {world_size - 1}, or raise {_WORLD}"
        raise ArgumentError(_RANK, rank, reason, way_out)
    # Every rank is planned on the first device.
    return Position(rank, world_size, 0)


def _one_of(flag: str, given: int | None, variable: str, env: Mapping[str, str], default: int) -> int:
    launched = numbered_variable(variable, -1, env)
    if launched < 0:
        return default if given is None else given
    if given is not None and given != launched:
        reason = f"the launcher says {variable}={launched}"
        raise ArgumentError(flag, given, reason, f"drop the flag, or unset {variable}")
    return launched


_NORM = Patch(
    target="megatron.core.optimizer.clip_grads:l2_norm_impl",
    new="mindspeed_megatron.tensor_norms:l2_norm",
    reason="makes a tensor from a list of numbers, which do not exist",
    # megatron.core.utils defines it, and every norm that is computed with it has the same trouble.
    every_name=True,
)
COUNTED = "bytes of tensors, counted"
_ROOM = 1 << 60


class DryRun(StoragePhases, Platform):
    """Common part of dry runs; stands before the platform whose device is planned.

    Attributes:
        answers: the numbers that code read from tensors without values; empty before a session computes.
        storage: follows every tensor of the session.
        communication: the calls of the session, and the process groups in the order in which they were made.
    """

    backend: ClassVar[str] = "fake"
    # Below whatever computes: `auto` leaves dry runs out altogether.
    preference: ClassVar[int] = -1000
    dry_run: ClassVar[bool] = True

    answers: Answers
    communication: CommunicationLog
    _position: Position | None = None
    _mode: Any = None
    _answering: Any = None
    _skew: float = 1.0
    _run: Run | None = None
    _computing: ExitStack | None = None

    def __init__(self) -> None:
        """Make the platform of one session."""

    def check_arguments(self, args: Namespace) -> None:
        """Refuse a rank that is in no world, what needs values, and what the planned device refuses."""
        super().check_arguments(args)
        if getattr(args, "use_megatron_fsdp", False):
            reason = "a dry run has no values, by which megatron-core sees that its parts of parameters fit"
            remedy = "plan with --use-torch-fsdp2 or --use-distributed-optimizer alone"
            raise ArgumentError("--use-megatron-fsdp", None, reason, remedy)
        self._position = fake_position(args)
        skew = getattr(args, "plan_skew", None)
        if skew is not None and not 0 < skew < float("inf"):
            reason = "experts get a positive multiple of the average"
            raise ArgumentError("--plan-skew", skew, reason, "use 1.3 for 30 % more, for instance")
        self._skew = 1.0 if skew is None else skew

    def position(self, args: Namespace) -> Position:
        """Return the rank that is planned: by ``--fake-rank``, or by the launcher's variables."""
        return fake_position(args)

    def patches(self) -> Sequence[Patch]:
        """Return the patches of the device, and those of a world without peers and values."""
        from mindspeed_megatron.fake.agreement import agreeing_ranks
        from mindspeed_megatron.fake.balanced import routing_of
        from mindspeed_megatron.fake.stages import told_shapes
        from mindspeed_megatron.fake.tensors import STORAGE_COPY, ShapesOnly, reading_patches, swap_patch

        assert self._position is not None
        own = super().patches()
        self._mode, self._answering = ShapesOnly(), self.answering_mode()
        self.answers = self._answering.answers
        routing = Patch(
            target="megatron.core.transformer.moe.router:TopKRouter.forward",
            new=routing_of(self._skew),
            kind="wrap",
            reason="which experts tokens go to depends on numbers that do not exist",
        )
        shapes = (
            _NORM,
            routing,
            STORAGE_COPY,
            swap_patch(self._mode),
            agreeing_ranks(self.answers),
            *reading_patches(self.answers),
            told_shapes(self._answering, self._crossing),
        )
        return (*own, *shapes, *world_patches(self._position))

    def answering_mode(self) -> AnsweringMode:
        """Make the mode that answers what has no shape function."""
        from mindspeed_megatron.fake.tensors import AnsweringMode

        return AnsweringMode(self.shapes())

    def set_device(self, local_rank: int) -> None:
        """Choose nothing: there is no device."""

    # Nothing is launched on the device that is planned: there is nothing to order and to wait for.
    synchronize = Platform.synchronize
    stream = Platform.stream
    current_stream = Platform.current_stream
    use_stream = Platform.use_stream
    event = Platform.event

    def shapes(self) -> Mapping[str, Callable[..., Any]]:
        """Return shape functions that take the place of an operation's own, by name with overload."""
        return {}

    def start(self, session: OpeningSession) -> None:
        """Compute in shapes alone from now on."""
        from mindspeed_megatron.fake.shortcut import Shortcut
        from mindspeed_megatron.fake.tensors import shapes_only
        from mindspeed_megatron.instruments.communication import count_communication
        from mindspeed_megatron.instruments.storage import StorageTracker

        self.storage = StorageTracker(self.device_type)
        self._computing = ExitStack()
        self.communication = self._computing.enter_context(
            count_communication(objects=True, contracts=self.contracts())
        )
        self._computing.enter_context(shapes_only(self._mode, self._answering))
        self._computing.enter_context(self.storage)
        self._computing.enter_context(Shortcut(self._mode, self._answering, self.storage))

    def shortcut(self, work: WorkCounter) -> Shortcut:
        """Return the mode that does at once what the session's modes and this counter behind them do."""
        from mindspeed_megatron.fake.shortcut import Shortcut

        return Shortcut(self._mode, self._answering, self.storage, work)

    def contracts(self) -> Sequence[BackendContract]:
        """Return the rules of the backends that would serve the launch; every call must keep them."""
        return ()

    def close(self, session: OpeningSession) -> None:
        """Leave the mode; the answers and the counted bytes stay."""
        computing, self._computing = self._computing, None
        if computing is not None:
            computing.close()
        self._run = None
        super().close(session)

    @hookimpl(wrapper=True)
    def build_model(self) -> Iterator[None]:
        """Refuse a model that depends on data, with the place that reads it."""
        from mindspeed_megatron.fake.answers import UnknownNumber

        try:
            model: list[MegatronModule] = yield  # type: ignore[assignment]
        except UnknownNumber as error:
            raise error.while_building() from None
        return model  # type: ignore[return-value]

    @hookimpl(wrapper=True)
    def get_forward_backward(self, run: Run) -> Iterator[None]:
        """Remember the run whose stages exchange tensors."""
        self._run = run
        schedule: Callable[..., Any] = yield  # type: ignore[assignment]
        return schedule  # type: ignore[return-value]

    def _crossing(self) -> Sequence[int] | None:
        """Return the shape of what crosses from stage to stage; None where data decides it."""
        run = self._run
        if run is None or run.boundary is None:
            return None
        # With --variable-seq-lengths too: samples of a dry run fill --seq-length.
        tensors = run.boundary.tensors
        return tensors[0].shape if len(tensors) == 1 else None

    def memory_allocated(self) -> MemoryFigure:
        """Return the bytes of the tensors that are alive."""
        return MemoryFigure(self.storage.alive, COUNTED)

    def peak_memory(self) -> MemoryFigure:
        """Return the most bytes of tensors alive since `reset_peak_memory`."""
        return MemoryFigure(self.storage.peak, COUNTED)

    def reset_peak_memory(self) -> None:
        """Start a new peak."""
        self.storage.reset_peak()

    def pinned_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a buffer of the host, which is not counted as the device's."""
        buffer = super().pinned_empty(shape, dtype)
        self.storage.mark_host(buffer)
        return buffer

    def memory_used(self) -> MemoryFigure:
        """Return the bytes of the tensors that are alive: nobody else is there."""
        return self.memory_allocated()

    def total_memory(self) -> int:
        """Return more than anything needs: what has no values fits anywhere."""
        return _ROOM


class FakePlatform(DryRun, CpuPlatform):
    """A dry run like the cpu platform: the same code runs, on tensors without values, and nobody is asked."""

    name: ClassVar[str] = "fake"
    like: ClassVar[str] = "cpu"

    @classmethod
    def probe(cls) -> Availability:
        """Answer that every machine can."""
        return Availability(True, "a dry run: nothing is computed, allocated or sent")
