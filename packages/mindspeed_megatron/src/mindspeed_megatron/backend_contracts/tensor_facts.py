"""A call of communication and its tensors, as a backend sees them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TensorFacts:
    """The properties of a tensor that a backend looks at.

    Attributes:
        argument: the name of the argument that holds it.
        dtype: ``float32``.
        shape: its sizes.
        contiguous: its elements lie in memory without gaps, in order.
        behind: bytes by which its first element lies behind a multiple of the size of an element.
    """

    argument: str
    dtype: str
    shape: tuple[int, ...]
    contiguous: bool = True
    behind: int = 0

    @classmethod
    def of(cls, argument: str, tensor: Tensor) -> TensorFacts:
        """Return the facts of a tensor; one without memory, of a dry run, begins where allocators begin."""
        from torch._subclasses.fake_tensor import FakeTensor

        address = 0 if isinstance(tensor, FakeTensor) else tensor.data_ptr()
        dtype = str(tensor.dtype).removeprefix("torch.")
        behind = address % tensor.element_size()
        return cls(argument, dtype, tuple(tensor.shape), tensor.is_contiguous(), behind)

    @property
    def numbers(self) -> int:
        """Return how many numbers it holds."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        """Return ``float32[4, 8]``."""
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class CollectiveCall:
    """One call as a backend sees it.

    Attributes:
        operation: the function's name, ``all_reduce``.
        group: description of the process group.
        size: number of its ranks.
        tensors: all tensors of the call, inputs and outputs.
        reduce_op: ``SUM``; empty for operations that only move data.
        splits: sizes of the parts of an ``all_to_all_single``, by argument; absent ones are equal.
        from_any: a receive that names no sender.
    """

    operation: str
    group: str
    size: int
    tensors: tuple[TensorFacts, ...] = ()
    reduce_op: str = ""
    splits: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    from_any: bool = False

    def of(self, argument: str) -> tuple[TensorFacts, ...]:
        """Return the tensors of an argument: one, those of a list, or none."""
        return tuple(tensor for tensor in self.tensors if tensor.argument == argument)

    def __str__(self) -> str:
        """Return operation, tensors, reduction and group."""
        named = ", ".join(dict.fromkeys(map(str, self.tensors[:4])))
        op = f" with {self.reduce_op}" if self.reduce_op else ""
        return f"{self.operation} of {named or 'nothing'}{op} in {self.group} ({self.size} ranks)"


def is_gloo_group(description: str) -> bool:
    """Return whether a group's description says that it is one of gloo, as those of megatron-core do."""
    return "gloo" in description.lower()
