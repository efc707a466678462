"""Repair of megatron-core's own offloading of activations, ``--fine-grained-activation-offloading``.

It copies storages to the host that their owner empties and computes again, and what nobody fetched in time it
brings back on the compute stream, which has not waited for the copy to the host. A host buffer is free for
the next copy as soon as its way back was launched, while that copy still reads it. Of several groups of one
name that are on their way back the compute stream waits for the first, whichever it goes on to read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed_megatron.dropped_storages import will_be_dropped

_COPIED = "_mindspeed_copied"
"""Attribute of a tensor on its way back, and of its host buffer: the event behind that copy."""


def sparing_dropped(original: Callable[[Any, torch.Tensor], bool]) -> Callable[[Any, torch.Tensor], bool]:
    """Return the choice of saved tensors that are moved, without those that will be dropped.

    Args:
        original: ``ChunkOffloadHandler.tensor_need_offloading_checker``.
    """

    def tensor_need_offloading_checker(self: Any, tensor: torch.Tensor) -> bool:
        return not will_be_dropped(tensor) and original(self, tensor)

    return tensor_need_offloading_checker


def waiting_for_copies(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the way back that waits for the way to the host, and says when it is over.

    Args:
        original: ``ChunkOffloadHandler.reload``.
    """

    def reload(self: Any, state: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        stream = torch.cuda.current_stream()
        # The stream of early copies has waited for the event of its group.
        if stream != self.h2d_stream:
            stream.wait_stream(self.d2h_stream)
        tensor = original(self, state, *args, **kwargs)
        # Events of a captured graph are its own, and its replays follow one another.
        copied = None if _capturing() else stream.record_event()
        setattr(tensor, _COPIED, copied)
        setattr(state[1], _COPIED, copied)
        return tensor

    return reload


def waiting_for_reads(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the choice of a host buffer, whose next copy waits for the one that still reads it.

    Args:
        original: ``allocate`` of the pool of host buffers.
    """

    def allocate(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return _after_its_copy(original(self, *args, **kwargs))

    return allocate


def waiting_for_arrival(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return what backward reads, whose stream waits until it is there.

    Args:
        original: ``ChunkOffloadHandler.tensor_pop``.
    """

    def tensor_pop(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return _after_its_copy(original(self, *args, **kwargs))

    return tensor_pop


def _after_its_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Let the current stream wait for the copy that reads or writes a tensor."""
    copied = getattr(tensor, _COPIED, None)
    if copied is not None and not _capturing():
        torch.cuda.current_stream().wait_event(copied)
    return tensor


def _capturing() -> bool:
    from megatron.core.transformer.cuda_graphs import is_graph_capturing

    return bool(is_graph_capturing())
