"""Integers and masks that are known although nothing is computed: they decide shapes.

What code makes on the host (sizes, indices, masks from arguments) has values, and what follows from known
values alone is known. The values travel with the tensors without values, so that split sizes, token counts
and the length of a selection are what they would be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only

from mindspeed_megatron.fake.answers import UnknownNumber, reading_place
from mindspeed_megatron.instruments.memory import tensors_in

_KNOWN = "_mindspeed_known"
_STALE = "_mindspeed_stale"
_LARGEST = 1 << 22
"""Elements up to which values are carried along."""
_RANDOM = torch.Tag.nondeterministic_seeded
_LENGTHS = frozenset(
    (
        torch.ops.aten.masked_select.default,
        torch.ops.aten.nonzero.default,
        torch.ops.aten.repeat_interleave.Tensor,
    )
)
"""Operations whose results are as long as their values say."""
_UNWRITTEN = "empty"
_SEED = torch.ops.aten.random_.default
"""Draws an integer without bounds, as data loaders do for their seed."""
_DRAWN = (torch.ops.aten.randint.default, torch.ops.aten.randint.low)
_SEEDS = 1 << 31
"""An integer that may be as large decides no shape: it is a seed too, as kernels with dropout draw it."""

_FINITE_CHECK = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
"""Writes into its second argument whether a gradient was infinite; with such a one no update would follow."""


def known_values(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the values of a tensor, None where nobody knows them."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    found: torch.Tensor | None = getattr(tensor, _KNOWN, None)
    if found is None:
        return tensor.constant
    return None if getattr(found.untyped_storage(), _STALE, False) else found


def set_known(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Say what the values of a tensor are; returns the tensor."""
    if isinstance(tensor, FakeTensor):
        setattr(tensor, _KNOWN, values)
    return tensor


def forget(tensor: Any) -> None:
    """Take back what is known of a tensor and its views: something unknown was written into it."""
    found = getattr(tensor, _KNOWN, None) if isinstance(tensor, FakeTensor) else None
    if found is not None:
        setattr(found.untyped_storage(), _STALE, True)


def is_countable(tensor: torch.Tensor) -> bool:
    """Return whether values of a tensor are worth carrying: integers and masks that are not too many."""
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex) and tensor.numel() <= _LARGEST


def run_known(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
    """Run an operation on shapes, and on values where all of them are known.

    Args:
        func: the operation.
        args: its arguments.
        kwargs: those by name.
        run: runs it on shapes.
    """
    if func in _LENGTHS:
        return _selected(func, args, kwargs, run)
    if func is _FINITE_CHECK:
        result = run()
        _zero(args[1])
        return result
    if args and isinstance(args[0], torch.Tensor) and args[0].dtype.is_floating_point:
        # What floating-point numbers become is never known.
        if func._schema.is_mutable:
            forget(args[0])
        return run()
    tensors = list(tensors_in((args, kwargs)))
    if not tensors:
        return _made(func, args, kwargs, run())
    if func is not _SEED and any(
        not is_countable(tensor) or known_values(tensor) is None for tensor in tensors
    ):
        if func._schema.is_mutable:
            _forget_written(func, args, kwargs)
        return run()
    result = run()
    if func is _SEED:
        return _zero(result)
    if _RANDOM not in func.tags and _UNWRITTEN not in func.name():
        _say(result, _computed(func, args, kwargs))
    return result


def _made(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Add the values of what a factory made; of unwritten memory and random numbers there are none."""
    # Whatever is drawn with a seed does not exist.
    if func in _DRAWN and result.numel() == 1 and max(n for n in args[:2] if isinstance(n, int)) >= _SEEDS:
        return _zero(result)
    worth = isinstance(result, FakeTensor) and is_countable(result)
    if worth and _UNWRITTEN not in func.name() and _RANDOM not in func.tags:
        _say(result, _computed(func, args, kwargs))
    return result


def _zero(tensor: torch.Tensor) -> torch.Tensor:
    """Say that a tensor is 0; returns it."""
    with _disable_current_modes():
        return set_known(tensor, torch.zeros(tensor.shape, dtype=tensor.dtype))


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    real_args, real_kwargs = tree_map_only(torch.Tensor, known_values, (args, kwargs))
    if isinstance(real_kwargs.get("device"), torch.device):
        real_kwargs = {**real_kwargs, "device": torch.device("cpu")}
    with _disable_current_modes(), torch.no_grad():
        return func(*real_args, **real_kwargs)


def _selected(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
    """Run an operation whose result is as long as its values say."""
    known = [known_values(value) for value in args if isinstance(value, torch.Tensor)]
    if all(values is not None for values in known):
        real = _computed(func, args, kwargs)
        made = args[0].new_empty(real.shape, dtype=real.dtype)
        return set_known(made, real) if is_countable(made) else made
    if func is torch.ops.aten.masked_select.default and known[1] is not None:
        with _disable_current_modes():
            shape = torch.broadcast_shapes(args[0].shape, known[1].shape)
            length = int(known[1].broadcast_to(shape).sum())
        return args[0].new_empty((length,))
    try:
        return run()
    except DynamicOutputShapeException:
        place = reading_place()
        raise UnknownNumber(
            place,
            f"{place} selects by values that a dry run does not have, so that nobody knows how much; what "
            "depends on the content of data cannot be planned",
        ) from None


def _say(result: Any, values: Any) -> None:
    results = [value for value in tree_iter(result) if isinstance(value, torch.Tensor)]
    reals = [value for value in tree_iter(values) if isinstance(value, torch.Tensor)]
    for tensor, real in zip(results, reals):
        if is_countable(tensor):
            set_known(tensor, real)


def _forget_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        for tensor in tree_iter(value):
            forget(tensor)


def _is_zero(tensor: torch.Tensor) -> bool:
    """Return whether all numbers are known to be 0, which they stay by whatever ranks are reduced."""
    values = known_values(tensor) if isinstance(tensor, FakeTensor) else None
    with _disable_current_modes():
        return values is not None and not bool(values.any())


def tell_all(func: Any, args: tuple[Any, ...]) -> None:
    """Let what is known of a collective's input be known of its output: every rank sends what this one does.

    Args:
        func: an operation of ``c10d``.
        args: its arguments.
    """
    name = func._opname
    if name == "_allgather_base_" and isinstance(args[0], torch.Tensor):
        _repeat(args[0], args[1])
    elif name == "allgather_":
        for outputs, local in zip(args[0], args[1]):
            for output in outputs:
                _repeat(output, local)
    elif name == "alltoall_base_":
        _exchange(*args[:5])
    elif name not in ("broadcast_", "barrier", "allreduce_"):
        for tensor in tree_iter(args):
            forget(tensor)
    elif name == "allreduce_":
        for tensor in args[0]:
            if not _is_zero(tensor):
                forget(tensor)


def tell_received(tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> None:
    """Let the integers that arrive in a message be known.

    Args:
        tensors: those of the message.
        numbers: as many as the message has.
    """
    for tensor in tensors:
        if is_countable(tensor) and tensor.numel() == len(numbers):
            with _disable_current_modes():
                set_known(tensor, torch.tensor(numbers, dtype=tensor.dtype).reshape(tensor.shape))


def _exchange(output: torch.Tensor, local: torch.Tensor, group: Any, received: Any, sent: Any) -> None:
    """Let what this rank sends to itself be known of every part that arrives, where lengths agree."""
    values = known_values(local) if is_countable(local) else None
    unboxed = ProcessGroup.unbox(group)
    size, rank = unboxed.size(), unboxed.rank()
    lengths = list(sent) or [local.shape[0] // size] * size
    if values is None or output.shape[0] != lengths[rank] * size or set(received) - {lengths[rank]}:
        forget(output)
        return
    with _disable_current_modes():
        part = values.split(lengths)[rank]
        set_known(output, part.repeat(size, *[1] * (part.dim() - 1)))


def _repeat(output: torch.Tensor, local: torch.Tensor) -> None:
    values = known_values(local) if is_countable(local) else None
    if values is None:
        forget(output)
        return
    with _disable_current_modes():
        times = output.numel() // max(1, local.numel())
        set_known(output, values.reshape(-1).repeat(times).reshape(output.shape))
