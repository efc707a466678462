"""Shapes of results that operations had before: a dry run does the same thing a thousand times.

torch's own mode remembers results too, under everything that any operation may depend on; finding one again
takes it longer than all else that a dry run does with an operation. Here only what is plain is remembered:
builtin operations on strided tensors that make new tensors, views of their arguments, or write in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mindspeed_megatron.instruments.memory import tensors_in

_PLAIN = frozenset(
    (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
_UNSURE = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view))
_RESIZING = ("aten::resize", "aten::set_", "aten::lift", "aten::_resize")
"""Operations that change a tensor or its storage itself, or take one over."""
_META = torch.device("meta")
# As it is before platforms wrap it, to translate names of devices.
_empty_strided = torch._C._VariableFunctions.empty_strided


@dataclass(frozen=True)
class _Made:
    """A tensor among the results: how to make it again.

    Attributes:
        argument: position of the argument that it is, or is a view of; None where it is new.
        same: it is that argument.
        shape: of the tensor.
        stride: of its elements.
        offset: of the first one in the storage.
        dtype: of the elements.
        device: that it pretends to be on.
        attributes: of every tensor of the mode on that device.
    """

    argument: int | None
    same: bool
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    attributes: Mapping[str, object]

    def again(self, args: Sequence[Any]) -> torch.Tensor:
        """Make the tensor from the arguments of another call."""
        if self.argument is None:
            empty = _empty_strided(self.shape, self.stride, dtype=self.dtype, device=_META)
        else:
            of: torch.Tensor = args[self.argument]
            if self.same:
                return of
            empty = _empty_strided((0,), (1,), dtype=self.dtype, device=_META)
            empty.set_(of.untyped_storage(), self.offset, self.shape, self.stride)
        # As its class makes it, without the checks of what does not change.
        made = torch.Tensor._make_subclass(
            FakeTensor, empty, False, dispatch_device=True, device_for_backend_keys=self.device
        )
        made.__dict__.update(self.attributes)
        return made


@dataclass(frozen=True)
class Results:
    """Results of a call.

    Attributes:
        container: list or tuple; None for one tensor.
        made: the tensors.
        floating: all of them have floating-point numbers, of which no values are ever known.
    """

    container: type[list[Any]] | type[tuple[Any, ...]] | None
    made: tuple[_Made, ...]
    floating: bool

    def again(self, args: Sequence[Any]) -> Any:
        """Make the results of another call with such arguments; no mode may be active."""
        if self.container is None:
            return self.made[0].again(args)
        return self.container(one.again(args) for one in self.made)

    def new(self, result: Any) -> list[torch.Tensor]:
        """Return those of the results that are neither arguments nor views of them."""
        listed = (result,) if self.container is None else result
        return [one for one, how in zip(listed, self.made) if how.argument is None]


class Remembered:
    """Results of operations in a mode, by operation and what its arguments are."""

    def __init__(self, mode: FakeTensorMode) -> None:
        """Begin with nothing."""
        self._mode = mode
        self._known: dict[Any, Results | None] = {}
        self._operations: dict[Any, bool] = {}
        self._attributes: dict[torch.device, Mapping[str, object]] = {}

    def key(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """Return what stands for a call, None where its results are not to be remembered."""
        known = self._operations.get(func)
        if known is None:
            known = self._operations[func] = _is_plain(func)
        if not known:
            return None
        found: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        if not self._describe(found, args):
            return None
        if kwargs:
            found += kwargs
            if not self._describe(found, kwargs.values()):
                return None
        return tuple(found)

    def find(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
        """Return what is known of the results of a call; None where it has to run."""
        key = self.key(func, args, kwargs)
        return None if key is None else self._known.get(key)

    def results_of(self, key: tuple[Any, ...]) -> Results | None:
        """Return what is known of the results of a call by its key."""
        return self._known.get(key)

    def remember(
        self, key: tuple[Any, ...], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Remember what a call returned, where it can be made again as it is."""
        if key not in self._known:
            self._known[key] = self._results(args, kwargs, result)

    def _describe(self, found: list[Any], values: Iterable[Any]) -> bool:
        for value in values:
            kind = value.__class__
            if kind is FakeTensor:
                if value.constant is not None or value.fake_mode is not self._mode:
                    return False
                dtype = value.dtype
                if dtype.is_complex or value.layout is not torch.strided:
                    return False
                found += (
                    dtype,
                    value.shape,
                    value.stride(),
                    value.storage_offset(),
                    value.fake_device,
                    value.requires_grad,
                )
            elif kind in _PLAIN:
                # 1, 1.0 and True are equal, and lead to other dtypes.
                found += (kind, value)
            elif kind is list or kind is tuple:
                found += (kind, len(value))
                if not self._describe(found, value):
                    return False
            else:
                return False
        return True

    def _results(self, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Results | None:
        container = type(result) if type(result) in (list, tuple) else None
        listed = tuple(result) if container else (result,)
        if not listed or not all(map(_is_made, listed)):
            return None
        given = Counter(map(_storage, tensors_in((args, dict(kwargs)))))
        made = [self._made(args, one) for one in listed]
        new = [_storage(one) for one, place in zip(listed, made) if place.argument is None]
        aliased = len({*new}) < len(new) or any(storage in given for storage in new)
        # A view of one of several arguments that share a storage may be of either.
        unsure = any(
            place.argument is not None and not place.same and given[_storage(one)] > 1
            for one, place in zip(listed, made)
        )
        # Without a tensor among the arguments, the device may be the current one.
        placed = bool(given) or getattr(kwargs.get("device"), "type", None) == "cpu"
        if aliased or unsure or not placed:
            return None
        found = Results(container, tuple(made), all(one.dtype.is_floating_point for one in made))
        again = found.again(args)
        return found if all(map(_alike, again if container else (again,), listed)) else None

    def _made(self, args: Sequence[Any], one: Any) -> _Made:
        """Return how to make a result again."""
        place, same = None, False
        for index, argument in enumerate(args):
            if argument is one:
                place, same = index, True
                break
            if isinstance(argument, torch.Tensor) and _storage(argument) == _storage(one):
                place = index
        device, offset = one.fake_device, one.storage_offset()
        if device not in self._attributes:
            empty = _empty_strided((0,), (1,), device=_META)
            self._attributes[device] = vars(FakeTensor(self._mode, empty, device))
        attributes = self._attributes[device]
        return _Made(place, same, tuple(one.shape), one.stride(), offset, one.dtype, device, attributes)


def _is_made(one: Any) -> bool:
    """Return whether a result is a tensor that can be made again."""
    if one.__class__ is not FakeTensor or one.constant is not None:
        return False
    return one.layout is torch.strided and not one.dtype.is_complex


def _is_plain(func: Any) -> bool:
    """Return whether an operation is one whose results follow from what its arguments are."""
    if not isinstance(func, torch._ops.OpOverload) or _UNSURE & {*func.tags}:
        return False
    name = func.name()
    return name.startswith("aten::") and not name.startswith(_RESIZING)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _alike(one: Any, other: Any) -> bool:
    """Return whether a tensor that was made again is what the operation made."""

    def facts(tensor: Any) -> tuple[object, ...]:
        keys = torch._C._dispatch_key_set(tensor)
        of_storage = tensor.untyped_storage().nbytes()
        shape = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        return shape, tensor.dtype, tensor.requires_grad, keys, of_storage, vars(tensor).keys()

    return facts(one) == facts(other)
