"""Answers of ``torch.cuda`` functions on the cpu platform while a session is open.

One function per name of ``torch.cuda``: the device is number 0, its generator is the default CPU generator,
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
    """Answer no: this process uses no cuda device, even where the machine has one."""
    return False


def device_count() -> int:
    """Return 1: this process is the one device."""
    return 1


def current_device() -> int:
    """Return index 0; device arguments accept it."""
    return 0


def set_device(device: Any) -> None:
    """Accept any device: there is only one."""


def synchronize(device: Any = None) -> None:
    """Return at once: everything has finished."""


def is_current_stream_capturing() -> bool:
    """Answer no: there are no graphs."""
    return False


def _lazy_init() -> None:
    """Do nothing: there is nothing to initialise."""


def _lazy_call(callable: Callable[[], object], **kwargs: Any) -> None:
    """Call now instead of after initialisation."""
    callable()


def enter_device(self: Any) -> None:
    """Enter ``with torch.cuda.device(…)``: there is only one."""


def exit_device(self: Any, type: Any, value: Any, traceback: Any) -> bool:
    """Restore nothing; exceptions pass through."""
    return False


def new_stream(cls: type, *args: Any, **kwargs: Any) -> HostStream:
    """Make a ``torch.cuda.Stream``."""
    return HostStream(*args, **kwargs)


def new_external_stream(cls: type, stream_ptr: Any, device: Any = None, **kwargs: Any) -> HostStream:
    """Make a ``torch.cuda.ExternalStream``."""
    return HostStream(device, **kwargs)


def new_event(cls: type, *args: Any, **kwargs: Any) -> HostEvent:
    """Make a ``torch.cuda.Event``."""
    return HostEvent(*args, **kwargs)


def current_stream(device: Any = None) -> HostStream:
    """Return the one stream."""
    return _DEFAULT_STREAM


default_stream = current_stream


def stream(stream: Any) -> contextlib.AbstractContextManager[None]:
    """Enter a stream, or None, as often as one likes; the order of execution stays that of the program."""
    return contextlib.nullcontext()


def set_stream(stream: Any) -> None:
    """Accept a stream; the order of execution stays that of the program."""


def range_push(msg: str, *args: Any) -> int:
    """Return depth 0: no profiler listens."""
    return 0


def range_pop() -> int:
    """Return depth 0: no profiler listens."""
    return 0


@contextlib.contextmanager
def nvtx_range(msg: str, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Enter a range without effect; also a decorator."""
    yield


def mark(msg: str, *args: Any, **kwargs: Any) -> None:
    """Do nothing: no profiler listens."""


class Generators:
    """``torch.cuda.default_generators``: each one is the CPU generator, from which dropout draws."""

    def __getitem__(self, index: int) -> torch.Generator:
        """Return the one generator."""
        return torch.default_generator

    def __len__(self) -> int:
        """Return 1: there is one device."""
        return 1


GENERATORS = Generators()


def get_rng_state(device: Any = "cuda") -> torch.Tensor:
    """Return the state of the CPU generator, uint8."""
    return torch.default_generator.get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the states of all devices: one."""
    return [torch.default_generator.get_state()]


def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    """Restore the CPU generator."""
    torch.default_generator.set_state(new_state)


def set_rng_state_all(new_states: Any) -> None:
    """Restore the only device's state."""
    for state in new_states:
        torch.default_generator.set_state(state)


def manual_seed(seed: int) -> None:
    """Seed the CPU generator."""
    torch.default_generator.manual_seed(int(seed))


manual_seed_all = manual_seed


def initial_seed() -> int:
    """Return the seed of the CPU generator."""
    return torch.default_generator.initial_seed()


def memory_allocated(device: Any = None) -> int:
    """Return the bytes resident in this process."""
    return process_memory.resident_bytes()


def max_memory_allocated(device: Any = None) -> int:
    """Return the peak of bytes resident in this process."""
    return process_memory.peak_resident_bytes()


memory_reserved = memory_allocated


max_memory_reserved = max_memory_allocated


def memory_stats(device: Any = None) -> defaultdict[str, int]:
    """Return current and peak bytes resident under the allocator's keys; zero for everything else."""
    now, peak = process_memory.resident_bytes(), process_memory.peak_resident_bytes()
    figures: defaultdict[str, int] = defaultdict(int)
    for kind in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        figures[f"{kind}.all.current"], figures[f"{kind}.all.peak"] = now, peak
    return figures


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Return available and physical bytes of the machine."""
    return process_memory.available_bytes(), process_memory.physical_bytes()


def reset_peak_memory_stats(device: Any = None) -> None:
    """Start a new peak where the operating system permits it."""
    process_memory.reset_peak()


reset_max_memory_allocated = reset_peak_memory_stats


def empty_cache() -> None:
    """Do nothing: there is no caching allocator."""


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """Do nothing: there is no allocator to restrict."""


def utilization(device: Any = None) -> int:
    """Return 0: there is no sensor of utilization, temperature, power or clock rate."""
    return 0


temperature = power_draw = clock_rate = utilization


def tensor_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the tensor (``Tensor.cuda``): it is where it should be."""
    return self


def tensor_pin_memory(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the tensor (``Tensor.pin_memory``): there is nothing to pin for."""
    return self


def tensor_record_stream(self: torch.Tensor, stream: Any) -> None:
    """Do nothing (``Tensor.record_stream``): no allocator reuses memory that a stream still reads."""


def module_cuda(self: torch.nn.Module, device: Any = None) -> torch.nn.Module:
    """Return the module (``Module.cuda``): it is where it should be."""
    return self
