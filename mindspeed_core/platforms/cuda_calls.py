"""What ``torch.cuda`` functions answer on the cpu platform while a session is open.

One function per name of ``torch.cuda``: the device is number 0, its generator is the processor's default one,
its streams order nothing, its memory is this process's. Whatever is not here keeps torch's own behaviour.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mindspeed_core.platforms import process_memory
from mindspeed_core.platforms.streams import HostEvent, HostStream

_DEFAULT_STREAM = HostStream()


def is_available() -> bool:
    """No cuda device is used in this process, whether or not the machine has one."""
    return False


def device_count() -> int:
    """One device: this process."""
    return 1


def current_device() -> int:
    """An index, as callers of torch expect; device arguments accept it."""
    return 0


def set_device(device: Any) -> None:
    """There is only one."""


def synchronize(device: Any = None) -> None:
    """Everything has finished."""


def is_current_stream_capturing() -> bool:
    """Nothing captures."""
    return False


def _lazy_init() -> None:
    """Nothing to initialise."""


def _lazy_call(callable: Callable[[], object], **kwargs: Any) -> None:
    """Call now instead of after initialisation."""
    callable()


def enter_device(self: Any) -> None:
    """``with torch.cuda.device(…)``: there is only one."""


def exit_device(self: Any, type: Any, value: Any, traceback: Any) -> bool:
    """Nothing to restore."""
    return False


def new_stream(cls: type, *args: Any, **kwargs: Any) -> HostStream:
    """``torch.cuda.Stream(…)``."""
    return HostStream(*args, **kwargs)


def new_external_stream(cls: type, stream_ptr: Any, device: Any = None, **kwargs: Any) -> HostStream:
    """``torch.cuda.ExternalStream(…)``."""
    return HostStream(device, **kwargs)


def new_event(cls: type, *args: Any, **kwargs: Any) -> HostEvent:
    """``torch.cuda.Event(…)``."""
    return HostEvent(*args, **kwargs)


def current_stream(device: Any = None) -> HostStream:
    """The one stream."""
    return _DEFAULT_STREAM


def default_stream(device: Any = None) -> HostStream:
    """The one stream."""
    return _DEFAULT_STREAM


@contextlib.contextmanager
def stream(stream: Any) -> Iterator[None]:
    """Launching on another stream changes nothing; None is legal."""
    yield


def set_stream(stream: Any) -> None:
    """Launching on another stream changes nothing."""


def range_push(msg: str, *args: Any) -> int:
    """No profiler listens; the nesting depth is not tracked."""
    return 0


def range_pop() -> int:
    """No profiler listens."""
    return 0


@contextlib.contextmanager
def nvtx_range(msg: str, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Context manager and decorator without effect."""
    yield


def mark(msg: str, *args: Any, **kwargs: Any) -> None:
    """No profiler listens."""


class Generators:
    """``torch.cuda.default_generators``: each one is the processor's generator, from which dropout draws."""

    def __getitem__(self, index: int) -> torch.Generator:
        """The one generator."""
        return torch.default_generator

    def __len__(self) -> int:
        """One device."""
        return 1


GENERATORS = Generators()


def get_rng_state(device: Any = "cuda") -> torch.Tensor:
    """State of the processor's generator, uint8."""
    return torch.default_generator.get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    """States of all devices: one."""
    return [torch.default_generator.get_state()]


def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    """Restore the processor's generator."""
    torch.default_generator.set_state(new_state)


def set_rng_state_all(new_states: Any) -> None:
    """Restore the only device's state."""
    for state in new_states:
        torch.default_generator.set_state(state)


def manual_seed(seed: int) -> None:
    """Seed the processor's generator."""
    torch.default_generator.manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed the processor's generator."""
    torch.default_generator.manual_seed(int(seed))


def initial_seed() -> int:
    """Seed of the processor's generator."""
    return torch.default_generator.initial_seed()


def memory_allocated(device: Any = None) -> int:
    """Bytes resident in this process."""
    return process_memory.resident_bytes()


def max_memory_allocated(device: Any = None) -> int:
    """Peak bytes resident in this process."""
    return process_memory.peak_resident_bytes()


def memory_reserved(device: Any = None) -> int:
    """Bytes resident in this process."""
    return process_memory.resident_bytes()


def max_memory_reserved(device: Any = None) -> int:
    """Peak bytes resident in this process."""
    return process_memory.peak_resident_bytes()


def memory_stats(device: Any = None) -> defaultdict[str, int]:
    """Current and peak bytes resident under the allocator's keys; zero for everything else."""
    now, peak = process_memory.resident_bytes(), process_memory.peak_resident_bytes()
    figures: defaultdict[str, int] = defaultdict(int)
    for kind in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        figures[f"{kind}.all.current"], figures[f"{kind}.all.peak"] = now, peak
    return figures


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Available and physical bytes of the machine."""
    return process_memory.available_bytes(), process_memory.physical_bytes()


def reset_peak_memory_stats(device: Any = None) -> None:
    """Start a new peak where the operating system permits it."""
    process_memory.reset_peak()


def reset_max_memory_allocated(device: Any = None) -> None:
    """Start a new peak where the operating system permits it."""
    process_memory.reset_peak()


def empty_cache() -> None:
    """There is no caching allocator."""


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """There is no allocator to restrict."""


def utilization(device: Any = None) -> int:
    """Percent; no sensor."""
    return 0


def temperature(device: Any = None) -> int:
    """Degrees; no sensor."""
    return 0


def power_draw(device: Any = None) -> int:
    """Milliwatt; no sensor."""
    return 0


def clock_rate(device: Any = None) -> int:
    """Hertz; no sensor."""
    return 0


def tensor_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``Tensor.cuda``: the tensor is where it should be."""
    return self


def tensor_pin_memory(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``Tensor.pin_memory``: there is nothing to pin for."""
    return self


def tensor_record_stream(self: torch.Tensor, stream: Any) -> None:
    """``Tensor.record_stream``: no allocator reuses memory behind a stream's back."""


def module_cuda(self: torch.nn.Module, device: Any = None) -> torch.nn.Module:
    """``Module.cuda``: the module is where it should be."""
    return self
