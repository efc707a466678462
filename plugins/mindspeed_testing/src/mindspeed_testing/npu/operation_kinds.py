"""Facts of operations that the value device needs before it sees a call, found out once for each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from mindspeed_testing.npu.fake import DEVICE_NAMESPACES
from mindspeed_testing.npu.generator import draws
from mindspeed_testing.npu.host_formulas import FORMULAS

_UNINITIALISED = frozenset(
    f"aten::{name}"
    for name in (
        *("empty.memory_format", "empty_strided", "empty_like", "new_empty", "new_empty_strided"),
        *("empty_permuted", "resize_"),
    )
)
"""Operations that hand out memory as they find it."""

_OF_STORAGE = frozenset(
    f"aten::{name}"
    for name in (
        *("set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor", "set_"),
        *("detach", "alias", "_reshape_alias", "_unsafe_view", "lift_fresh", "record_stream", "is_pinned"),
        *("_pin_memory", "set_data", "is_same_size", "resize_as_"),
    )
)
"""Operations that look at no element; like views, torch_npu runs them itself."""

_FACTS = frozenset({"npu::get_npu_format", "npu::get_storage_size"})
"""Operations of torch_npu that only look at a tensor's description."""

_TAKES_HOST_TENSORS = ("copy", "to_copy", "index", "_index_put", "_unsafe_index", "_to_copy", "set_")
"""Beginnings of the operations of PyTorch whose arguments may be on both sides."""


@dataclass(frozen=True)
class OperationKind:
    """The nature of an operation.

    Attributes:
        name: with its namespace and overload.
        is_own: of the device's namespaces, so that a contract computes it.
        is_collective: of torch.distributed.
        allocates: hands out memory as it finds it.
        keeps_values: looks at no element.
        one_device: takes tensors of one side only.
        without_kernel: of PyTorch, and torch_npu has no kernel of it.
        draws: takes random numbers.
        formula: what computes it on the host in its place; None for itself.
        device_place: position of its argument ``device``; -1 where there is none.
    """

    name: str
    is_own: bool
    is_collective: bool
    allocates: bool
    keeps_values: bool
    one_device: bool
    without_kernel: bool
    draws: bool
    formula: Any
    device_place: int

    def wanted_device(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the device that a call asks for, None where it asks for none."""
        if self.device_place < 0:
            return None
        return args[self.device_place] if self.device_place < len(args) else kwargs.get("device")


@cache
def kind_of(func: Any) -> OperationKind:
    """Return the kind of an operation."""
    name = func.name()
    of_pytorch = func.namespace == "aten"
    names = [argument.name for argument in func._schema.arguments]
    mixed = name.removeprefix("aten::").startswith(_TAKES_HOST_TENSORS)
    return OperationKind(
        name=name,
        is_own=func.namespace in DEVICE_NAMESPACES and name not in _FACTS and name not in FORMULAS,
        is_collective=func.namespace == "c10d",
        allocates=name in _UNINITIALISED,
        keeps_values=name in _OF_STORAGE or name in _FACTS or bool(func.is_view),
        one_device=of_pytorch and not mixed,
        without_kernel=of_pytorch and not _has_kernel(name),
        draws=draws(func),
        formula=FORMULAS.get(name),
        device_place=names.index("device") if "device" in names else -1,
    )


def _has_kernel(operation: str) -> bool:
    found = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = ("PrivateUse1", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
    return any(found(operation, key) for key in keys)
