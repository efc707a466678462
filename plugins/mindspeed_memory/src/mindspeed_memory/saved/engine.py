"""The engine of saved tensors: what autograd saves inside of chosen modules is put away, and brought back.

Storages are put away whole and once, whatever views of them are saved. The saved values own what was put away
and nothing else does: autograd lets go of each value when its node has run, when a graph is dropped without
backward, and when backward fails, and what it stood for goes with it. Bringing something back early is a
matter of time alone; whoever needs it first brings it back.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mindspeed_core.megatron.dropped_storages import will_be_dropped


class PutAway(Protocol):
    """A storage that was put away."""

    @property
    def is_near(self) -> bool:
        """Return whether it can be read at once, or is on its way."""

    def release(self) -> None:
        """Let go of the original."""

    def fetch(self) -> None:
        """Begin to bring it back."""

    def flat(self) -> Tensor:
        """Return the storage as a tensor ``[n]``."""


Codec = Callable[[Tensor], "PutAway | None"]
"""Puts a whole storage ``[n]`` away; None where that is of no use."""
Accepts = Callable[[Tensor], bool]


class _Group:
    """What one call of a module saved; knows what the calls before it did, the nearest first."""

    def __init__(self, before: Iterable[weakref.ref[_Group]]) -> None:
        self.put_away: weakref.WeakSet[Any] = weakref.WeakSet()
        self.before = tuple(before)

    def fetch(self) -> None:
        for one in list(self.put_away):
            one.fetch()


@dataclass(frozen=True)
class _Known:
    """What became of a storage, as long as there is one or the other; its key may be another's afterwards."""

    storage: weakref.ref[torch.UntypedStorage]
    what: weakref.ref[PutAway]
    version: int


@dataclass(frozen=True)
class _Saved:
    """A saved tensor: a view of what was put away."""

    what: PutAway
    group: _Group
    engine: SavedTensors
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class SavedTensors:
    """Puts away what autograd saves inside of scopes.

    Attributes:
        late: how often something had to be brought back at the moment it was needed.
        dropped: how many saved tensors stayed because their owner empties them.
    """

    def __init__(self, codec: Codec, *, min_bytes: int, depth: int = 1) -> None:
        """Start with nothing put away.

        Args:
            codec: puts storages away.
            min_bytes: smaller storages stay.
            depth: how many calls ahead of backward are brought back.
        """
        self.late = self.dropped = 0
        self._codec = codec
        self._min_bytes = min_bytes
        self._depth = depth
        self._recent: deque[weakref.ref[_Group]] = deque(maxlen=max(depth, 1))
        self._pending: list[PutAway] = []
        self._kept: frozenset[int] = frozenset()
        self._known: dict[int, _Known] = {}

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Never put the storages of these tensors away; parameters and their buffers, for instance."""
        self._kept = frozenset(tensor.untyped_storage()._cdata for tensor in tensors if _is_plain(tensor))

    def may(self, tensor: Tensor) -> bool:
        """Return whether a saved tensor may be put away at all."""
        return self._may(tensor)

    def let_go(self) -> None:
        """Let go of the originals of what was put away; what is computed from now on waits for the copies."""
        self._let_go()

    def begin(self) -> None:
        """Begin the forward pass of a micro-batch through a chunk: nothing comes before its first call."""
        self._recent.clear()
        self._known.clear()

    def end(self, output: Any) -> None:
        """End it: let go of originals, and bring the last calls back when backward arrives.

        Args:
            output: of the chunk.
        """
        self._let_go()
        last = list(self._recent)
        self._recent.clear()
        self._known.clear()
        if isinstance(output, Tensor) and output.requires_grad and self._depth:
            output.register_hook(lambda gradient: _fetch(last))

    def scope(
        self,
        forward: Callable[..., Any],
        *,
        accepts: Accepts | None = None,
        apart: bool = False,
    ) -> Callable[..., Any]:
        """Return a forward inside of which saved tensors are put away.

        Args:
            forward: of a module.
            accepts: which tensors, of those that may be put away at all; by default every one.
            apart: every storage is brought back apart from the others.
        """

        @wraps(forward)
        def scoped(*args: Any, **kwargs: Any) -> Any:
            # What is computed again in backward is needed at once.
            if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
                return forward(*args, **kwargs)
            self._let_go()
            pack = self._packer(accepts, apart)
            with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
                return forward(*args, **kwargs)

        return scoped

    def _packer(self, accepts: Accepts | None, apart: bool) -> Callable[[Tensor], Any]:
        group: list[_Group] = []

        def pack(tensor: Tensor) -> Any:
            if not self._may(tensor) or (accepts is not None and not accepts(tensor)):
                return kept_by_its_node(tensor)
            what = self._put_away(tensor)
            if what is None:
                return kept_by_its_node(tensor)
            if not group or (apart and what not in group[0].put_away):
                group[:] = [_Group(reversed(self._recent) if self._depth else ())]
                self._recent.append(weakref.ref(group[0]))
            group[0].put_away.add(what)
            offset = int(tensor.storage_offset())
            return _Saved(what, group[0], self, tensor.dtype, tensor.size(), tensor.stride(), offset)

        return pack

    def _put_away(self, tensor: Tensor) -> PutAway | None:
        """Put a storage away, unless it is already, by this module or by one before it."""
        storage, version = tensor.untyped_storage(), tensor._version
        known = self._known.get(storage._cdata)
        if known is not None and known.storage() is storage and known.version == version:
            what = known.what()
            if what is not None:
                return what
        with torch.no_grad():
            what = self._codec(_whole(tensor))
        if what is not None:
            self._known[storage._cdata] = _Known(weakref.ref(storage), weakref.ref(what), version)
            self._pending.append(what)
        return what

    def _may(self, tensor: Tensor) -> bool:
        if tensor.grad_fn is None or isinstance(tensor, torch.nn.Parameter):
            return False
        if isinstance(tensor._base, torch.nn.Parameter) or not _is_plain(tensor) or tensor.is_complex():
            return False
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if size < max(self._min_bytes, 1) or size % tensor.element_size():
            return False
        if will_be_dropped(tensor):
            self.dropped += 1
            return False
        return storage._cdata not in self._kept

    def _let_go(self) -> None:
        pending, self._pending = self._pending, []
        for what in pending:
            what.release()


def kept_by_its_node(tensor: Tensor) -> Tensor:
    """Return a tensor that autograd keeps as it is.

    The result of a node must not be held with its graph by what the node saves: nobody would free either.
    Leaves stay themselves, whose gradients are accumulated.
    """
    return tensor if tensor.grad_fn is None else tensor.detach()


def _unpack(saved: Any) -> Tensor:
    if not isinstance(saved, _Saved):
        tensor: Tensor = saved
        return tensor
    if not saved.what.is_near:
        saved.engine.late += 1
    flat = saved.what.flat()
    _fetch(saved.group.before)
    if flat.dtype != saved.dtype:
        flat = flat.view(saved.dtype)
    return flat.as_strided(saved.size, saved.stride, saved.offset)


def _fetch(groups: Sequence[weakref.ref[_Group]]) -> None:
    for reference in groups:
        group = reference()
        if group is not None:
            group.fetch()


def _whole(tensor: Tensor) -> Tensor:
    """Return the whole storage of a tensor ``[n]``, in its dtype."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((count,), (1,), 0)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)
