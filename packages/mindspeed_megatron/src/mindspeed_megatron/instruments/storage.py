"""Tensors of a rank by what they are for: bytes alive, at the peak of each phase, and who made them.

`StorageTracker` follows every storage with the operation, the module and the Python stack that made it, on
tensors with values and in a dry run alike, which is how both are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_iter

from mindspeed_megatron.instruments import memory
from mindspeed_megatron.instruments.code_places import running_code
from mindspeed_megatron.instruments.held_tensors import (
    ACTIVATIONS,
    BUFFERS,
    GRADIENTS,
    KINDS,
    MAIN_PARAMETERS,
    OPTIMIZER_STATE,
    OTHER,
    PARAMETERS,
    Held,
    HeldTensor,
    Module,
    Peak,
    Phase,
    PhaseBytes,
    StorageWatcher,
)
from mindspeed_megatron.instruments.kept_state import inner_optimizers
from mindspeed_megatron.instruments.memory import TensorBytes
from mindspeed_megatron.instruments.observer import Observer
from mindspeed_megatron.unwrap import unwrap

if TYPE_CHECKING:
    from types import TracebackType

    from mindspeed_core.run import Run


_FIRST = "build"
_FRAMES = 8
_COMPILED = "a compiled function"
_BETWEEN = (
    str(Path(__file__).parent),
    # A dry run does there what modes do.
    str(Path(__file__).parent.with_name("fake")),
    memory.__file__,
    str(Path(torch.__file__).parent),
    "<",
)


class StorageTracker(Observer, TensorBytes):
    """Follows storages with their origin; costs 20 to 40 µs per operation.

    ``alive`` and ``peak`` are those of the device; tensors elsewhere are counted apart.

    Attributes:
        host: bytes alive on the host, where it is not the device, and of buffers that stand for its memory.
    """

    def __init__(self, device_type: str = "cpu", *, whole_graphs: bool = False) -> None:
        """Start with nothing alive.

        Args:
            device_type: of the device that is planned; on ``cpu`` everything is on the device.
            whole_graphs: no graph of autograd was begun before. What a compiled function made is then told
                from what existed before, and counts from the first operation that takes it on. What it keeps
                for its own backward, and nothing else takes, is not seen.
        """
        super().__init__()
        self.host = 0
        self._device_type = device_type
        self._whole_graphs = whole_graphs
        self._held: dict[int, Held] = {}
        self._clock = 0
        self._peak_at = 0
        self._last: Held | None = None
        self._departed: list[Held] = []
        self._modules: list[Module] = []
        self._names: dict[int, str] = {}
        self._operation: Any = None
        self._phase = Phase(_FIRST, 0)
        self._ended: dict[str, Phase] = {}
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

    def made_by(self, func: Any, tensors: Iterable[torch.Tensor]) -> None:
        """Follow the storages of tensors that an operation made out of sight."""
        self._operation = func
        self.made(tensors)

    def reset_peak(self) -> None:
        """Start a new peak at what is alive now."""
        super().reset_peak()
        self._peak_at = self._clock
        self._last = None
        self._departed.clear()

    def phase(self, name: str) -> None:
        """End the current phase and begin one of this name; the first is ``build``."""
        self.end_phase()
        self._phase = Phase(name, self.alive)
        self.reset_peak()

    def end_phase(self) -> None:
        """End the current phase: what it held at its peak is remembered."""
        phase, before = self._phase, self._ended.get(self._phase.name)
        phase.end = self.alive
        if before is None or self.peak > before.peak.bytes:
            phase.peak = Peak(self.peak, tuple(self._at_peak()), self._last)
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
        self._modules.append(Module(id(module), type(module).__name__, within))

    def _leave_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        while self._modules and self._modules.pop().identity != id(module):
            pass

    def _met(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> None:
        made = self._whole_graphs and storage._cdata not in self._foreign
        if not made or (tensor.grad_fn is None and torch._C._current_graph_task_id() == -1):
            super()._met(storage, tensor)
            return
        before, self._operation = self._operation, _COMPILED
        self._follow(storage, tensor)
        self._operation = before

    def _allocated(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> None:
        self._clock += 1
        held = Held(storage.nbytes(), tensor.device.type, self._clock, str(self._operation))
        held.module = self._modules[-1] if self._modules else None
        held.backward = torch._C._current_graph_task_id() != -1
        held.frames = running_code(_BETWEEN, _FRAMES)
        held.shape, held.dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        self._hold(storage._cdata, held)

    def _hold(self, key: int, held: Held) -> None:
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

    def _release(self, key: int) -> Held | None:
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
        after = Held(storage.nbytes(), before.device, self._clock, before.operation)
        after.kind, after.module, after.frames = before.kind, before.module, before.frames
        after.backward, after.shape, after.dtype = before.backward, before.shape, before.dtype
        self._hold(key, after)

    def _move(self, key: int, held: Held, device: str) -> None:
        if self._watcher is not None:
            self._watcher.released(key)
        self.alive -= held.bytes
        self.host += held.bytes
        held.device = device

    def _at_peak(self) -> Iterator[Held]:
        for held in (*self._departed, *self._held.values()):
            if held.born <= self._peak_at and held.bytes:
                yield held

    def _described(self, phase: Phase, largest: int) -> PhaseBytes:
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

    def _tensor(self, held: Held) -> HeldTensor:
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

    def _name(self, held: Held) -> str:
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


def _kind(held: Held) -> str:
    return held.kind or (ACTIVATIONS if held.module is not None else OTHER)


def _followed(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def _gradients(parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    for parameter in parameters:
        for gradient in (getattr(parameter, "main_grad", None), parameter.grad):
            if isinstance(gradient, torch.Tensor):
                yield gradient
