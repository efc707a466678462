"""The mode in which a dry run computes: torch's fake tensors, with answers where code reads a number.

Nothing is ever allocated. Collectives that have no shape function return finished work at once. Backward runs
on the calling thread, so that what observes a thread sees it too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from mindspeed_core.errors import UserError
from mindspeed_core.feature import Patch
from mindspeed_megatron.equal_blocks import without_values
from mindspeed_megatron.fake.answers import Answers, reading_place
from mindspeed_megatron.fake.known import known_values, run_known, tell_all, tell_received
from mindspeed_megatron.fake.remembered import Remembered
from mindspeed_megatron.instruments.memory import DEVICE, device_of

_RECEIVED = "c10d::recv_"
_READ = torch.ops.aten._local_scalar_dense.default
_COALESCED = frozenset(
    f"c10d::{name}"
    for name in (
        "allreduce_coalesced_",
        "allgather_coalesced_",
        "allgather_into_tensor_coalesced_",
        "reduce_scatter_tensor_coalesced_",
    )
)
Shapes = Mapping[str, Callable[..., Any]]
"""Shape functions by operation with overload, in the place of its own."""


class UnusableDevice(UserError):
    """Device of a tensor that the installed torch cannot differentiate on."""


class ShapesOnly(FakeTensorMode):
    """Fake tensors; of a device that is announced and must not be started.

    Attributes:
        made_once: tensors that a process would make once and keep, by a key of whoever makes them; a dry run
            has its own, which end with it.
        remembered: shapes of results of operations that ran before.
    """

    def __init__(self) -> None:
        """Accept tensors with values beside those without."""
        super().__init__(allow_non_fake_inputs=True)
        self.made_once: dict[object, torch.Tensor] = {}
        self.remembered = Remembered(self)

    def dispatch(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation on shapes, one that ran before from what is remembered of it."""
        given = dict(kwargs or {})
        key = self.remembered.key(func, args, given)
        if key is None:
            return super().dispatch(func, types, args, given)
        known = self.remembered.results_of(key)
        if known is not None:
            return known.again(args)
        result = super().dispatch(func, types, args, given)
        self.remembered.remember(key, args, given, result)
        return result

    @property
    def avoid_device_init(self) -> bool:
        """Return whether constants stay on the host until they are fake."""
        return True


class AnsweringMode(TorchDispatchMode):
    """Answers what has no shape function.

    Attributes:
        answers: the numbers that were given.
    """

    def __init__(self, shapes: Shapes | None = None) -> None:
        """Start with nothing answered; ``shapes`` stands in for shape functions."""
        super().__init__()
        self.answers = Answers()
        self._arriving: Sequence[int] | None = None
        self._shapes = {_operation(name): shape for name, shape in (shapes or {}).items()}

    @contextmanager
    def receiving(self, numbers: Sequence[int]) -> Iterator[None]:
        """Let integers that are received in this block be these."""
        self._arriving = numbers
        try:
            yield
        finally:
            self._arriving = None

    def has_own_shape(self, func: Any) -> bool:
        """Return whether an operation is given a shape here, in the place of its own."""
        return func in self._shapes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on shapes.

        Raises:
            UnusableDevice: it puts a tensor on a device of CUDA, in a torch that is built without it.
        """
        if func is DEVICE:
            return device_of(args[0])
        kwargs = kwargs or {}
        if _names_cuda(kwargs.get("device")) and not torch.backends.cuda.is_built():
            raise UnusableDevice(
                f"{reading_place()} makes a tensor labelled cuda, and a torch without CUDA aborts "
                "the process as soon as such a tensor requires grad; leave the device to the platform "
                "(torch.cuda.current_device()), or plan with a torch that is built for CUDA"
            )
        if func is _READ and isinstance(args[0], FakeTensor):
            values = known_values(args[0])
            if values is None:
                return self.answers.number(args[0])
            with unset_fake_temporarily():
                return values.item()
        if _communicates(func):
            tell_all(func, args)
            if self._arriving is not None and func.name() == _RECEIVED:
                tell_received(args[0], self._arriving)
            if func.name() in _COALESCED:
                from torch.distributed._meta_registrations import create_fakework

                return create_fakework(args, return_first_arg=False)
            # The mode below would find the same function anew for each of thousands of calls.
            shape = _collectives().get(func._opname, func)
            return shape(*args, **kwargs)
        shapes = self._shapes.get(func)
        if shapes is not None:
            return shapes(*args, **kwargs)
        return run_known(func, args, kwargs, lambda: func(*args, **kwargs))


@functools.lru_cache(maxsize=1)
def _collectives() -> Mapping[str, Callable[..., Any]]:
    """Return torch's shape functions of collectives, by name: nothing arrives, and their work is done."""
    from torch.distributed import _meta_registrations

    return _meta_registrations._META_FUNCTIONS


@functools.lru_cache(maxsize=4096)
def _communicates(func: Any) -> bool:
    return bool(func.namespace == "c10d")


def _names_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _operation(name: str) -> Any:
    """Return the operation ``namespace.name.overload``."""
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def reading_patches(answers: Answers) -> tuple[Patch, ...]:
    """Return the patches of ``Tensor.tolist`` and ``Tensor.numpy``, which read memory past every mode."""

    def values_of(tensor: torch.Tensor, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if not isinstance(tensor, FakeTensor):
            return original(tensor, *args, **options)
        values = known_values(tensor)
        if values is None:
            return original(answers.numbers(tensor), *args, **options)
        return original(values, *args, **options)

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def read(self: torch.Tensor, *args: Any, **options: Any) -> Any:
            with _disable_current_modes():
                return values_of(self, original, *args, **options)

        return read

    return tuple(
        Patch(
            target=f"torch:Tensor.{name}",
            new=wrap,
            kind="wrap",
            reason="reads memory that a tensor without values does not have",
        )
        for name in ("tolist", "numpy")
    )


@contextmanager
def shapes_only(mode: ShapesOnly, answering: AnsweringMode) -> Iterator[AnsweringMode]:
    """Compute on tensors without values inside the context; what is made inside means nothing outside.

    Args:
        mode: makes the tensors; `swap_patch` needs the same.
        answering: answers what has no shape function.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(without_values())
        stack.enter_context(mode)
        stack.enter_context(answering)
        yield answering


STORAGE_COPY = Patch(
    target="torch:UntypedStorage.copy_",
    new=lambda storage, source, non_blocking=None: storage,
    kind="replace",
    reason="there are no values to copy, and the mode would never forget the storages that it copies between",
)
"""Code that fills a storage again after it was emptied, as checkpoints without output do, copies storages."""


def swap_patch(mode: ShapesOnly) -> Patch:
    """Return the patch of ``torch.utils.swap_tensors``, by which a module of fake parameters is converted.

    It refuses tensors with weak references, and the mode itself holds some, to recognise what it has seen.
    And it swaps attributes too, where a parameter that is converted in place keeps those that it was given.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def swap_tensors(first: torch.Tensor, second: torch.Tensor) -> None:
            mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
            given = dict(first.__dict__)
            original(first, second)
            for name in given.keys() - first.__dict__.keys():
                first.__dict__[name] = given[name]

        return swap_tensors

    return Patch(
        target="torch.utils:swap_tensors",
        new=wrap,
        kind="wrap",
        reason="the mode's weak references to its tensors keep them from being swapped",
    )
