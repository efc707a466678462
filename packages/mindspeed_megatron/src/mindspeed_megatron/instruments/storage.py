"""Tensors of a rank by what they are for: bytes alive, at the peak of each phase, and who made them.

`StorageTracker` follows every storage with the operation, the module and the Python stack that made it, on
tensors with values and in a dry run alike, which is how both are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_iter

from mindspeed_megatron.instruments import memory
from mindspeed_megatron.instruments.code_places import running_code
from mindspeed_megatron.instruments.kept_state import inner_optimizers
from mindspeed_megatron.instruments.memory import TensorBytes
from mindspeed_megatron.unwrap import unwrap

if TYPE_CHECKING:
    from types import CodeType, TracebackType

    from mindspeed_core.run import Run

PARAMETERS = "parameters"
BUFFERS = "buffers"
GRADIENTS = "gradients"
MAIN_PARAMETERS = "main parameters"
OPTIMIZER_STATE = "optimizer state"
ACTIVATIONS = "activations"
OTHER = "other"
KINDS = (PARAMETERS, BUFFERS, GRADIENTS, MAIN_PARAMETERS, OPTIMIZER_STATE, ACTIVATIONS, OTHER)
"""Uses of tensors. Activations are what a module's forward pass makes, recomputed ones included."""

_FIRST = "build"
_FRAMES = 8
_BETWEEN = (str(Path(__file__).parent), memory.__file__, str(Path(torch.__file__).parent), "<")


class _Module(NamedTuple):
    """A module whose forward pass runs, within another one's."""

    identity: int
    kind: str
    within: _Module | None


class _Held:
    """One storage while it has one size."""

    __slots__ = (
        "backward",
        "born",
        "bytes",
        "device",
        "dtype",
        "frames",
        "kind",
        "module",
        "operation",
        "shape",
    )

    def __init__(self, size: int, device: str, born: int, operation: str) -> None:
        self.bytes = size
        self.device = device
        self.born = born
        self.operation = operation
        self.kind = ""
        self.module: _Module | None = None
        self.backward = False
        self.frames: tuple[tuple[CodeType, int], ...] = ()
        self.shape: tuple[int, ...] = ()
        self.dtype = ""


@dataclass(frozen=True)
class HeldTensor:
    """A storage that was alive at a peak.

    Attributes:
        bytes: its size.
        kind: one of `KINDS`.
        device: type of its device.
        shape: of the tensor that it was made for.
        dtype: ``bfloat16``.
        module: qualified name of the module whose forward pass made it; empty for none.
        operation: the operator that made it, ``aten.mm.default``.
        stack: places in the code that led there, innermost first: ``file:line (function)``.
    """

    bytes: int
    kind: str
    device: str
    shape: tuple[int, ...]
    dtype: str
    module: str
    operation: str
    stack: tuple[str, ...]


@dataclass(frozen=True)
class PhaseBytes:
    """The bytes of one phase of a run; of several times the same phase, the largest peak.

    Attributes:
        name: one of `mindspeed_megatron.instruments.phases.PHASES`, or the caller's own.
        begin: bytes on the device when it last began.
        end: bytes on the device when it last ended.
        peak: most bytes on the device in it.
        host: bytes of the host at that moment; 0 where the device is the host and nothing was moved.
        operation: the operator that made the tensor which reached the peak.
        module: the module in whose forward pass that was; empty for none.
        stack: where it was called, innermost first.
        kinds: bytes at the peak by kind, the device's alone.
        modules: activations at the peak by module, the number of a layer left out: ``decoder.layers.*.mlp``.
        largest: the largest tensors at the peak, those of the host included.
    """

    name: str
    begin: int
    end: int
    peak: int
    host: int
    operation: str
    module: str
    stack: tuple[str, ...]
    kinds: Mapping[str, int]
    modules: Mapping[str, int]
    largest: tuple[HeldTensor, ...]


class StorageWatcher(Protocol):
    """Is told of storages on the device, each by a key that is its own while it is alive."""

    def taken(self, key: int, size: int) -> None:
        """``size`` bytes were allocated."""

    def released(self, key: int) -> None:
        """The storage was freed, or is about to get another size."""


@dataclass
class _Peak:
    """A peak that has been reached: which storages were alive, and what made the last of them."""

    bytes: int
    held: tuple[_Held, ...]
    last: _Held | None


@dataclass
class _Phase:
    name: str
    begin: int
    end: int = 0
    peak: _Peak = field(default_factory=lambda: _Peak(0, (), None))


class StorageTracker(TensorBytes):
    """Follows storages with their origin; costs 20 to 40 µs per operation.

    ``alive`` and ``peak`` are those of the device; tensors elsewhere are counted apart.

    Attributes:
        host: bytes alive on the host, where it is not the device, and of buffers that stand for its memory.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        """Start with nothing alive.

        Args:
            device_type: of the device that is planned; on ``cpu`` everything is on the device.
        """
        super().__init__()
        self.host = 0
        self._device_type = device_type
        self._held: dict[int, _Held] = {}
        self._clock = 0
        self._peak_at = 0
        self._last: _Held | None = None
        self._departed: list[_Held] = []
        self._modules: list[_Module] = []
        self._names: dict[int, str] = {}
        self._operation: Any = None
        self._phase = _Phase(_FIRST, 0)
        self._ended: dict[str, _Phase] = {}
        self._hooks = ExitStack()
        self._watcher: StorageWatcher | None = None

    def __enter__(self) -> StorageTracker:
        """Begin to follow storages and modules."""
        super().__enter__()
        for hook in (
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ):
            self._hooks.callback(hook.remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop; what was counted stays."""
        self._hooks.close()
        super().__exit__(kind, error, trace)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and follow the storages it created."""
        self._operation = func
        return super().__torch_dispatch__(func, types, args, kwargs)

    def reset_peak(self) -> None:
        """Start a new peak at what is alive now."""
        super().reset_peak()
        self._peak_at = self._clock
        self._last = None
        self._departed.clear()

    def phase(self, name: str) -> None:
        """End the current phase and begin one of this name; the first is ``build``."""
        self.end_phase()
        self._phase = _Phase(name, self.alive)
        self.reset_peak()

    def end_phase(self) -> None:
        """End the current phase: what it held at its peak is remembered."""
        phase, before = self._phase, self._ended.get(self._phase.name)
        phase.end = self.alive
        if before is None or self.peak > before.peak.bytes:
            phase.peak = _Peak(self.peak, tuple(self._at_peak()), self._last)
            self._ended[phase.name] = phase
        else:
            # Of two steps with nearly the same peak, a few bytes would decide how much there was before.
            before.begin, before.end = phase.begin, phase.end

    @contextmanager
    def watched_by(self, watcher: StorageWatcher) -> Iterator[None]:
        """Tell a watcher of storages on the device: those alive, largest first, then what comes and goes."""
        alive = [(key, held.bytes) for key, held in self._held.items() if held.device == self._device_type]
        for key, size in sorted(alive, key=lambda item: -item[1]):
            watcher.taken(key, size)
        self._watcher = watcher
        try:
            yield
        finally:
            self._watcher = None

    def mark(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """Say what tensors are for, also for what was counted so far; what is said first holds."""
        for tensor in tensors:
            held = self._held.get(tensor.untyped_storage()._cdata) if _followed(tensor) else None
            if held is not None and not held.kind:
                held.kind = kind

    def mark_host(self, tensor: torch.Tensor) -> None:
        """Say that a tensor stands for memory of the host, although its device has another name."""
        key = tensor.untyped_storage()._cdata
        held = self._held.get(key)
        if held is not None and held.device == self._device_type:
            self._move(key, held, "host")

    def mark_run(self, run: Run) -> None:
        """Say what the parameters, gradients and optimizer state of a run are for, and name its modules."""
        chunks = [unwrap(chunk) for chunk in run.model]
        for number, chunk in enumerate(chunks):
            prefix = f"chunk {number} " if len(chunks) > 1 else ""
            self._names |= {id(module): prefix + name for name, module in chunk.named_modules()}
        parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        self.mark(PARAMETERS, parameters)
        self.mark(BUFFERS, (buffer for chunk in chunks for buffer in chunk.buffers()))
        self.mark(GRADIENTS, _gradients(parameters))
        for inner in inner_optimizers(run.optimizer):
            self.mark(MAIN_PARAMETERS, (p for group in inner.param_groups for p in group["params"]))
            self.mark(GRADIENTS, _gradients(p for group in inner.param_groups for p in group["params"]))
            self.mark(
                OPTIMIZER_STATE,
                (
                    v
                    for entry in inner.state.values()
                    for v in tree_iter(entry)
                    if isinstance(v, torch.Tensor)
                ),
            )

    def report(self, largest: int = 12) -> tuple[PhaseBytes, ...]:
        """Return what each phase that has ended held, in the order in which they first ended.

        Args:
            largest: tensors to name at each peak.
        """
        return tuple(self._described(phase, largest) for phase in self._ended.values())

    def now(self) -> Mapping[str, int]:
        """Return the bytes alive on the device by kind."""
        kinds: Counter[str] = Counter()
        for held in self._held.values():
            if held.device == self._device_type:
                kinds[_kind(held)] += held.bytes
        return {kind: kinds[kind] for kind in KINDS if kinds[kind]}

    def _enter_module(self, module: torch.nn.Module, args: Any) -> None:
        within = self._modules[-1] if self._modules else None
        self._modules.append(_Module(id(module), type(module).__name__, within))

    def _leave_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        while self._modules and self._modules.pop().identity != id(module):
            pass

    def _allocated(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> None:
        self._clock += 1
        held = _Held(storage.nbytes(), tensor.device.type, self._clock, str(self._operation))
        held.module = self._modules[-1] if self._modules else None
        held.backward = torch._C._current_graph_task_id() != -1
        held.frames = running_code(_BETWEEN, _FRAMES)
        held.shape, held.dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        self._hold(storage._cdata, held)

    def _hold(self, key: int, held: _Held) -> None:
        self._held[key] = held
        self._sizes[key] = held.bytes
        if held.device != self._device_type:
            self.host += held.bytes
            return
        if self._watcher is not None:
            self._watcher.taken(key, held.bytes)
        self.alive += held.bytes
        if self.alive > self.peak:
            self.peak, self._peak_at, self._last = self.alive, self._clock, held
            self._departed.clear()

    def _release(self, key: int) -> _Held | None:
        held = self._held.pop(key, None)
        self._sizes.pop(key, None)
        if held is None:
            return None
        self._clock += 1
        if held.device != self._device_type:
            self.host -= held.bytes
        else:
            self.alive -= held.bytes
            if self._watcher is not None:
                self._watcher.released(key)
        self._departed.append(held)
        return held

    def _freed(self, key: int) -> None:
        if not self._closed:
            del self._finalizers[key]
            self._release(key)

    def _resized(self, storage: torch.UntypedStorage, amount: int) -> None:
        if self._paused:
            return
        key = storage._cdata
        before = self._release(key)
        if before is None:
            # It existed before: only its change counts.
            self._ignore(storage)
            self.alive += amount
            self.peak = max(self.peak, self.alive)
            return
        self._clock += 1
        after = _Held(storage.nbytes(), before.device, self._clock, before.operation)
        after.kind, after.module, after.frames = before.kind, before.module, before.frames
        after.backward, after.shape, after.dtype = before.backward, before.shape, before.dtype
        self._hold(key, after)

    def _move(self, key: int, held: _Held, device: str) -> None:
        if self._watcher is not None:
            self._watcher.released(key)
        self.alive -= held.bytes
        self.host += held.bytes
        held.device = device

    def _at_peak(self) -> Iterator[_Held]:
        for held in (*self._departed, *self._held.values()):
            if held.born <= self._peak_at and held.bytes:
                yield held

    def _described(self, phase: _Phase, largest: int) -> PhaseBytes:
        kinds: Counter[str] = Counter()
        modules: Counter[str] = Counter()
        host = 0
        for held in phase.peak.held:
            if held.device != self._device_type:
                host += held.bytes
                continue
            kind = _kind(held)
            kinds[kind] += held.bytes
            if kind == ACTIVATIONS:
                modules[without_numbers(self._name(held))] += held.bytes
        top = sorted(phase.peak.held, key=lambda held: (-held.bytes, held.born))[:largest]
        last = phase.peak.last
        return PhaseBytes(
            name=phase.name,
            begin=phase.begin,
            end=phase.end,
            peak=phase.peak.bytes,
            host=host,
            operation=last.operation if last is not None else "",
            module=self._name(last) if last is not None else "",
            stack=tuple(map(str, last.frames)) if last is not None else (),
            kinds={kind: kinds[kind] for kind in KINDS if kinds[kind]},
            modules=dict(modules.most_common()),
            largest=tuple(self._tensor(held) for held in top),
        )

    def _tensor(self, held: _Held) -> HeldTensor:
        return HeldTensor(
            held.bytes,
            _kind(held),
            held.device,
            held.shape,
            held.dtype,
            self._name(held),
            held.operation,
            tuple(map(str, held.frames)),
        )

    def _name(self, held: _Held) -> str:
        """Return a module's path; of one that is made on the way, the path around it and its class.

        Where no module around it has a name either, the class stands alone.
        """
        module, unknown = held.module, ""
        while module is not None:
            known = self._names.get(module.identity)
            if known is not None:
                return ".".join(filter(None, (known, unknown)))
            unknown = ".".join(filter(None, (module.kind, unknown)))
            module = module.within
        return held.module.kind if held.module is not None else ""


def without_numbers(name: str) -> str:
    """Return a module's name without the numbers of layers: ``decoder.layers.*.mlp``."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _kind(held: _Held) -> str:
    return held.kind or (ACTIVATIONS if held.module is not None else OTHER)


def _followed(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def _gradients(parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    for parameter in parameters:
        for gradient in (getattr(parameter, "main_grad", None), parameter.grad):
            if isinstance(gradient, torch.Tensor):
                yield gradient
