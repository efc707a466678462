"""Records of tensors by what they are for: bytes alive, and the peak of each phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from types import CodeType


PARAMETERS = "parameters"
BUFFERS = "buffers"
GRADIENTS = "gradients"
MAIN_PARAMETERS = "main parameters"
OPTIMIZER_STATE = "optimizer state"
ACTIVATIONS = "activations"
OTHER = "other"
KINDS = (PARAMETERS, BUFFERS, GRADIENTS, MAIN_PARAMETERS, OPTIMIZER_STATE, ACTIVATIONS, OTHER)
"""Uses of tensors. Activations are what a module's forward pass makes, recomputed ones included."""


class Module(NamedTuple):
    """A module whose forward pass runs, within another one's."""

    identity: int
    kind: str
    within: Module | None


class Held:
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
        self.module: Module | None = None
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
    """Begin of a phase of a training, by its name."""

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
class Peak:
    """A peak that has been reached: which storages were alive, and what made the last of them."""

    bytes: int
    held: tuple[Held, ...]
    last: Held | None


@dataclass
class Phase:
    """Begin of a phase of a training, by its name."""

    name: str
    begin: int
    end: int = 0
    peak: Peak = field(default_factory=lambda: Peak(0, (), None))
