"""Storages that their owner will empty between forward and backward, and fill again before they are read.

A checkpoint that drops its output knows so when it returns it; modules behind it save it for backward, and
whoever puts saved tensors away asks here first. A copy of such a storage would be a waste at best: it is
under way while the storage is emptied.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

_MARK = "_mindspeed_dropped"


def announce_drop(tensors: Iterable[torch.Tensor]) -> None:
    """Say of the storages of tensors that their owner will empty them."""
    for tensor in tensors:
        if tensor.layout is torch.strided:
            # torch keeps the Python object of a storage as long as the storage.
            setattr(tensor.untyped_storage(), _MARK, True)


def will_be_dropped(tensor: torch.Tensor) -> bool:
    """Return whether the owner of a tensor's storage will empty it."""
    return tensor.layout is torch.strided and getattr(tensor.untyped_storage(), _MARK, False)
