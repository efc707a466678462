"""Base class of platforms: device, backend, place, memory, streams, pinned buffers and random state.

The base class has the semantics of a machine without a device runtime (streams that order nothing, buffers
that need no pinning); platforms with one override them. Importing this module loads no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from mindspeed_core.errors import SessionError
from mindspeed_core.feature import Patch
from mindspeed_core.platforms.machine import numbered_variable, processor_name

if TYPE_CHECKING:
    from argparse import Namespace
    from pathlib import Path

    import torch

    from mindspeed_core.runtime.patches import PatchLedger


class OpeningSession(Protocol):
    """The part of a `Session` that a platform uses while the session opens or closes.

    Attributes:
        args: the parsed arguments.
        ledger: takes patches and settings, and takes them back when the session closes.
    """

    args: Namespace
    ledger: PatchLedger

    def setenv(self, name: str, value: str) -> None:
        """Set an environment variable until the session closes."""


class Availability(NamedTuple):
    """The answer of a platform's probe: usable here or not, and one sentence why, which ``auto`` prints."""

    available: bool
    reason: str


class MemoryFigure(NamedTuple):
    """A number of bytes and the source it was read from, which is always printed beside it."""

    bytes: int
    source: str


class Place(NamedTuple):
    """Place in which a process computes, for reports.

    Attributes:
        node: name of the node.
        local_rank: number of the process on its node.
        device: the process's device, ``cuda:3`` or ``cpu``.
        model: the device's name, ``NVIDIA H200``; empty where nobody knows it.
        driver: version of the device's driver; empty where there is none.
    """

    node: str
    local_rank: int
    device: str
    model: str
    driver: str = ""

    def __str__(self) -> str:
        """Return ``cuda:3 (NVIDIA H200, driver 550.54.15) on node-7``."""
        facts = [self.model, f"driver {self.driver}" if self.driver else ""]
        known = ", ".join(filter(None, facts))
        return f"{self.device}{f' ({known})' if known else ''} on {self.node}"


class StepBytes(Protocol):
    """Counts bytes between entering and leaving it.

    Attributes:
        alive: bytes now, relative to the start.
        peak: largest value of ``alive`` since the start or the last `reset_peak`.
    """

    @property
    def alive(self) -> int:
        """Return the bytes now."""

    @property
    def peak(self) -> int:
        """Return the most bytes."""

    def reset_peak(self) -> None:
        """Start a new peak at what is alive now."""

    def paused(self) -> AbstractContextManager[Any]:
        """Leave out what is created inside the context."""

    def __enter__(self) -> Any:
        """Begin to count."""

    def __exit__(self, *error: Any) -> Any:
        """Stop."""


class Position(NamedTuple):
    """Position of a process in the world of a launch: its rank, all ranks, and its number on its node."""

    rank: int
    world_size: int
    local_rank: int


class Platform:
    """Base of every platform. Instantiated once per session, without arguments."""

    name: ClassVar[str] = ""
    like: ClassVar[str] = ""
    """A platform whose features run here too, with what they require there; empty for none."""
    device_type: ClassVar[str] = "cpu"
    """``torch.device`` type."""
    backend: ClassVar[str] = "gloo"
    """``torch.distributed`` backend."""
    preference: ClassVar[int] = 0
    """``auto`` takes the available platform with the highest preference."""
    collectives_asynchronous: ClassVar[bool] = False
    """True where a collective proceeds beside computation without occupying the compute units."""
    memory_is_host: ClassVar[bool] = True
    """True where tensors of the device lie in the host's memory: nothing is copied to read them."""
    distributions: ClassVar[Sequence[str]] = ()
    """Distributions whose versions take part in the cross-rank check."""
    backend_temporaries: ClassVar[Mapping[str, float]] = {}
    """Memory of the host or device that the backend takes during a collective and that is no tensor: by
    operation, as a multiple of the whole tensor (what is gathered, or what is reduced and scattered)."""
    dry_run: ClassVar[bool] = False
    """True where tensors have shapes and no values, and the other ranks do not exist: hosts read and write no
    files there, and show no number that values decide."""

    _recorded: Any = None

    @classmethod
    def kinds(cls) -> frozenset[str]:
        """Return the names under which features may list this platform: its own and the one it is `like`."""
        return frozenset(filter(None, (cls.name, cls.like)))

    @classmethod
    def probe(cls) -> Availability:
        """Say whether the platform can be used in this process. May import torch, never changes anything."""
        raise TypeError(f"platform {cls.__name__} does not implement probe()")

    def patches(self) -> Sequence[Patch]:
        """Return the patches the platform needs; they are applied before those of features."""
        return ()

    def check_arguments(self, args: Namespace) -> None:
        """Refuse flags that ask for what the device does not have; called before a session opens.

        Raises:
            mindspeed_core.errors.ArgumentError: names the flag, its value and the way out.
        """

    def open(self, session: OpeningSession) -> None:
        """Prepare the process; called when a session opens, after the platform's patches were applied."""

    def close(self, session: OpeningSession) -> None:
        """Undo what `open` did; called when the session closes, before patches are taken back.

        The base class ends a recording of memory: call it from your own.
        """
        if self._recorded is not None:
            self.record_memory(entries=0)

    def device(self, local_rank: int) -> torch.device:
        """Return the device of this process."""
        import torch

        return torch.device(self.device_type)

    def energy(self) -> float | None:
        """Return the energy that this process's device has taken since some moment, in joules.

        None where the device does not tell.
        """
        return None

    def set_device(self, local_rank: int) -> None:
        """Make the device of this process current."""

    def position(self, args: Namespace) -> Position:
        """Return rank, world size and local rank of this process, before there is a process group.

        Args:
            args: the parsed arguments; the base class reads the launcher's variables alone.

        Raises:
            mindspeed_core.errors.UserError: a variable of the launcher is no number.
        """
        return Position(*map(numbered_variable, ("RANK", "WORLD_SIZE", "LOCAL_RANK"), (0, 1, 0)))

    def start(self, session: OpeningSession) -> None:
        """Begin to compute; called when everything of a session is in place, last of its opening."""

    def place(self, local_rank: int | None = None) -> Place:
        """Return where this process computes.

        Args:
            local_rank: number of the process on its node; by default the launcher's ``LOCAL_RANK``, or 0.
        """
        from socket import gethostname

        number = int(os.environ.get("LOCAL_RANK", "0")) if local_rank is None else local_rank
        device = self.device(number)
        return Place(gethostname(), number, str(device), self.device_model(device), self.driver())

    def device_model(self, device: torch.device) -> str:
        """Return the name of a device's model."""
        return processor_name()

    def driver(self) -> str:
        """Return the version of the device's driver; empty where there is none."""
        return ""

    def supported_dtypes(self) -> frozenset[torch.dtype]:
        """Return the dtypes in which a model trains here."""
        import torch

        return frozenset({torch.float32, torch.bfloat16, torch.float16})

    def memory_allocated(self) -> MemoryFigure:
        """Return the bytes in use now."""
        raise TypeError(f"platform {self.name} does not implement memory_allocated()")

    def peak_memory(self) -> MemoryFigure:
        """Return the peak of bytes in use since `reset_peak_memory`, where the source can be reset."""
        raise TypeError(f"platform {self.name} does not implement peak_memory()")

    def reset_peak_memory(self) -> None:
        """Start a new peak measurement, where the source allows it."""

    def step_bytes(self) -> StepBytes:
        """Return what counts the bytes of a step of training, without a change of what it trains.

        The base class follows tensors, since it has no allocator that counts them: right where compiled
        functions are held eager. A platform that compiles counts with its allocator.
        """
        from mindspeed_core.discovery.parts import part

        counter: StepBytes = part("TensorBytes")()
        return counter

    def record_memory(self, entries: int = 100_000) -> None:
        """Record allocations and releases from now on, with their Python stacks, for `memory_snapshot`.

        A recording that is under way ends, and closing the session ends it too. The base class follows
        tensors (`mindspeed_megatron.instruments.allocation_history`), 20 to 50 µs per operator.

        Args:
            entries: events to keep, the latest; 0 to record no more.
        """
        from mindspeed_core.discovery.parts import part

        if self._recorded is not None:
            self._recorded.stop()
            self._recorded = None
        if entries:
            self._recorded = part("AllocationHistory")(entries)
            self._recorded.start()

    def memory_snapshot(self, path: str | Path) -> Path:
        """Write the recorded allocations to a file that https://pytorch.org/memory_viz draws.

        Args:
            path: of the pickle file; its folder is created. The recording goes on.

        Returns:
            The path.

        Raises:
            SessionError: nothing is recorded; `record_memory` starts it.
        """
        import pickle
        from pathlib import Path

        if self._recorded is None:
            raise SessionError(f"platform {self.name}: no memory is recorded; call record_memory() before")
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not through a temporary file of the library's, which others than the owner could not read.
        partial = path.with_name(path.name + ".partial")
        with partial.open("wb") as file:
            pickle.dump(self._snapshot(), file)
        return partial.replace(path)

    def _snapshot(self) -> dict[str, Any]:
        snapshot: dict[str, Any] = self._recorded.snapshot()
        return snapshot

    def memory_pool(self) -> Callable[[], AbstractContextManager[Any]]:
        """Make a pool of device memory, where the allocator has pools.

        Returns:
            Called for each block whose allocations of this thread come from the pool. The pool lives as long
            as it, and what was allocated in it longer.
        """
        return nullcontext

    def memory_used(self) -> MemoryFigure:
        """Return the bytes of the device that are in use, by whatever process."""
        raise TypeError(f"platform {self.name} does not implement memory_used()")

    def total_memory(self) -> int:
        """Return the bytes of memory of the device."""
        raise TypeError(f"platform {self.name} does not implement total_memory()")

    def set_memory_limit(self, fraction: float) -> None:
        """Restrict this process to a fraction of the device's memory, where the runtime can."""

    def allocator_settings(self, settings: str) -> None:
        """Set the caching allocator's options (``max_split_size_mb:…``), where there is one."""

    def empty_cache(self) -> None:
        """Return cached device memory, where there is a cache."""

    def synchronize(self) -> None:
        """Wait for everything launched on the device."""

    def stream(self, priority: int = 0) -> Any:
        """Make a stream: ``wait_stream``, ``wait_event``, ``synchronize``, ``record_event``."""
        from mindspeed_core.platforms.streams import HostStream

        return HostStream(priority=priority)

    def current_stream(self) -> Any:
        """Return the stream in use."""
        from mindspeed_core.platforms.streams import HostStream

        return HostStream()

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Launch on ``stream`` inside the context."""
        return nullcontext(stream)

    def event(self, enable_timing: bool = False) -> Any:
        """Make an event: ``record``, ``wait``, ``synchronize``, ``query``, ``elapsed_time`` (ms)."""
        from mindspeed_core.platforms.streams import HostEvent

        return HostEvent(enable_timing=enable_timing)

    def pinned_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a host buffer from which copies to the device are asynchronous."""
        import torch

        return torch.empty(tuple(shape), dtype=dtype)

    def rng_state(self) -> torch.Tensor:
        """Return the device generator's state, uint8."""
        import torch

        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore what `rng_state` returned."""
        import torch

        torch.set_rng_state(state)
