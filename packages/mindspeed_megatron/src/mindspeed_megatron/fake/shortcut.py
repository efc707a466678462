"""One step for an operation that ran before, in the place of four modes that pass it on.

In a dry run an operation goes through the counter of work, the tracker of storages, the mode that answers and
the one that makes tensors; passing it on takes most of the time. Where all that is known of an operation is
shapes that are remembered, the outermost mode does what they would do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from mindspeed_megatron.fake.known import forget
from mindspeed_megatron.fake.tensors import AnsweringMode, ShapesOnly
from mindspeed_megatron.instruments.memory import DEVICE, device_of
from mindspeed_megatron.instruments.storage import StorageTracker
from mindspeed_megatron.instruments.work_counter import WorkCounter

_FAKE = torch._C._TorchDispatchModeKey.FAKE


class Shortcut(TorchDispatchMode):
    """Does what the modes of a dry run do, at once; entered behind all of them.

    With any other mode among them it passes everything on, and operations of a device's own library always:
    what is counted or checked of those stays where it is.
    """

    def __init__(
        self,
        shapes: ShapesOnly,
        answering: AnsweringMode,
        storage: StorageTracker,
        work: WorkCounter | None = None,
    ) -> None:
        """Stand for these modes, which were entered in this order, and for another one that does."""
        super().__init__()
        self._shapes, self._answering, self._storage, self._work = shapes, answering, storage, work
        self._alone = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled in a dry run, and asking takes as long as an answer.
        return False

    def __enter__(self) -> Shortcut:
        """Begin, where no other mode is between them."""
        own = (self._shapes, self._answering, self._storage, self._work)
        entered = [mode for mode in _get_current_dispatch_mode_stack() if not isinstance(mode, Shortcut)]
        self._alone = {*map(id, entered)} == {id(mode) for mode in own if mode is not None}
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Make the results of an operation, or pass it on."""
        first: Any = args[0] if args else None
        if func is DEVICE:
            return first.device if first.__class__ is FakeTensor else device_of(first)
        kwargs = kwargs or {}
        storage = self._storage
        known = (
            self._alone
            and torch._C._get_dispatch_mode(_FAKE) is self._shapes
            and not storage.is_paused
            and not self._answering.has_own_shape(func)
        )
        found = self._shapes.remembered.find(func, args, kwargs) if known else None
        if found is None:
            return func(*args, **kwargs)
        # What floating-point numbers become is never known; of others, values may be.
        if first.__class__ is FakeTensor and first.dtype.is_floating_point:
            if func._schema.is_mutable:
                forget(first)
        elif func._schema.is_mutable or not found.floating:
            return func(*args, **kwargs)
        with torch._C._DisableTorchDispatch():
            result = found.again(args)
        storage.made_by(func, found.new(result))
        if self._work is not None:
            self._work.ran(func, args, kwargs, result)
        return result
