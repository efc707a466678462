"""The engine of saved tensors: store what autograd saves in chosen modules elsewhere, and prefetch it.

A codec stores it in another form: a copy in host memory, or compressed. Storages are stored whole and once,
whatever views of them are saved. The saved values own the stored form and nothing else does: autograd
releases each value when its node has run, when a graph is dropped without backward, and when backward fails,
and the stored form is freed with it. Prefetching changes the time alone: whoever needs a tensor first
fetches it.
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

from mindspeed_megatron.dropped_storages import will_be_dropped


class Stored(Protocol):
    """A storage in the form in which it is stored until backward."""

    @property
    def is_on_device(self) -> bool:
        """Return whether it can be read at once, or is being fetched."""

    def release(self) -> None:
        """Release the original."""

    def fetch(self) -> None:
        """Begin to fetch it back to the device."""

    def flat(self) -> Tensor:
        """Return the storage as a tensor ``[n]``."""


Codec = Callable[[Tensor], "Stored | None"]
"""Stores a whole storage ``[n]`` in another form; None where that is of no use."""
Accepts = Callable[[Tensor], bool]


class _Group:
    """Saved tensors of one call of a module; links to the calls before it, the nearest first."""

    def __init__(self, before: Iterable[weakref.ref[_Group]]) -> None:
        self.stored: weakref.WeakSet[Any] = weakref.WeakSet()
        self.before = tuple(before)

    def fetch(self) -> None:
        for stored in list(self.stored):
            stored.fetch()


@dataclass(frozen=True)
class _CacheEntry:
    """Result for one storage, valid while it or the result exists; its key may be reused afterwards."""

    storage: weakref.ref[torch.UntypedStorage]
    stored: weakref.ref[Stored]
    version: int


@dataclass(frozen=True)
class _Saved:
    """A saved tensor: a view of a stored storage."""

    stored: Stored
    group: _Group
    engine: SavedTensors
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class SavedTensors:
    """Stores what autograd saves inside of scopes elsewhere.

    Attributes:
        late: how often a tensor was not prefetched when backward needed it.
        dropped: how many saved tensors stayed because their owner empties them.
        small: how many stayed because they are small, or because the codec has no use for them.
        again: how many calls of chosen modules computed them again in backward.
    """

    def __init__(self, codec: Codec, *, min_bytes: int, depth: int = 1) -> None:
        """Start with nothing stored.

        Args:
            codec: stores storages in another form.
            min_bytes: smaller storages stay.
            depth: how many calls ahead of backward are prefetched.
        """
        self.late = self.dropped = self.small = self.again = 0
        self._codec = codec
        self._min_bytes = min_bytes
        self._depth = depth
        self._recent: deque[weakref.ref[_Group]] = deque(maxlen=max(depth, 1))
        self._pending: list[Stored] = []
        self._kept: frozenset[int] = frozenset()
        self._cache: dict[int, _CacheEntry] = {}

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Never store the storages of these tensors elsewhere; parameters and their buffers, for instance."""
        self._kept = frozenset(tensor.untyped_storage()._cdata for tensor in tensors if _is_plain(tensor))

    def may(self, tensor: Tensor) -> bool:
        """Return whether a saved tensor may be stored elsewhere at all."""
        return self._may(tensor)

    def count_again(self) -> bool:
        """Return whether a call computes its module again in backward, and count it."""
        again = torch._C._current_graph_task_id() != -1
        self.again += again
        return again

    def release_originals(self) -> None:
        """Release the originals of stored storages; what is computed from now on waits for their copies."""
        pending, self._pending = self._pending, []
        for stored in pending:
            stored.release()

    def begin(self) -> None:
        """Begin the forward pass of a micro-batch through a chunk: nothing comes before its first call."""
        self._recent.clear()
        self._cache.clear()

    def end(self, output: Any) -> None:
        """End it: release originals, and fetch the last calls when backward arrives.

        Args:
            output: of the chunk.
        """
        self.release_originals()
        self._fetch_from(output)
        self._cache.clear()

    def before(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward whose backward is the first to fetch, in the place of that of the whole chunk.

        The beginning of backward is where most is alive; a layer that stores nothing needs nothing there.

        Args:
            forward: of a module behind the last scope.
        """

        @wraps(forward)
        def fetching(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor) and first.requires_grad and torch._C._current_graph_task_id() == -1:
                self._fetch_from(first)
            return output

        return fetching

    def _fetch_from(self, output: Any) -> None:
        """Fetch the last calls when the gradient of an output arrives."""
        last = list(self._recent)
        self._recent.clear()
        if isinstance(output, Tensor) and output.requires_grad and self._depth:
            output.register_hook(lambda gradient: _fetch(last))

    def scope(
        self,
        forward: Callable[..., Any],
        *,
        accepts: Accepts | None = None,
        apart: bool = False,
    ) -> Callable[..., Any]:
        """Return a forward inside of which saved tensors are stored elsewhere.

        Args:
            forward: of a module.
            accepts: which tensors, of those that may be stored elsewhere at all; by default every one.
            apart: fetch every storage separately.
        """

        @wraps(forward)
        def scoped(*args: Any, **kwargs: Any) -> Any:
            # What is recomputed in backward is needed at once.
            if self.count_again() or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            self.release_originals()
            pack = self._packer(accepts, apart)
            with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
                return forward(*args, **kwargs)

        return scoped

    def _packer(self, accepts: Accepts | None, apart: bool) -> Callable[[Tensor], Any]:
        group: list[_Group] = []

        def pack(tensor: Tensor) -> Any:
            if not self._may(tensor) or (accepts is not None and not accepts(tensor)):
                return kept_by_its_node(tensor)
            stored = self._store(tensor)
            if stored is None:
                return kept_by_its_node(tensor)
            if not group or (apart and stored not in group[0].stored):
                group[:] = [_Group(reversed(self._recent) if self._depth else ())]
                self._recent.append(weakref.ref(group[0]))
            group[0].stored.add(stored)
            offset = int(tensor.storage_offset())
            return _Saved(stored, group[0], self, tensor.dtype, tensor.size(), tensor.stride(), offset)

        return pack

    def _store(self, tensor: Tensor) -> Stored | None:
        """Store a storage, unless it is already, by this module or by one before it."""
        storage, version = tensor.untyped_storage(), tensor._version
        cached = self._cache.get(storage._cdata)
        if cached is not None and cached.storage() is storage and cached.version == version:
            stored = cached.stored()
            if stored is not None:
                return stored
        with torch.no_grad():
            stored = self._codec(_whole(tensor))
        if stored is not None:
            self._cache[storage._cdata] = _CacheEntry(weakref.ref(storage), weakref.ref(stored), version)
            self._pending.append(stored)
        else:
            self.small += 1
        return stored

    def _may(self, tensor: Tensor) -> bool:
        if tensor.grad_fn is None or isinstance(tensor, torch.nn.Parameter):
            return False
        if isinstance(tensor._base, torch.nn.Parameter) or not _is_plain(tensor) or tensor.is_complex():
            return False
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if size < max(self._min_bytes, 1) or size % tensor.element_size():
            self.small += 1
            return False
        if will_be_dropped(tensor):
            self.dropped += 1
            return False
        return storage._cdata not in self._kept


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
    if not saved.stored.is_on_device:
        saved.engine.late += 1
    flat = saved.stored.flat()
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
