"""Repair of megatron-core's own offloading of activations, ``--fine-grained-activation-offloading``.

It copies storages to the host that their owner empties and computes again, and what nobody fetched in time it
brings back on the compute stream, which has not waited for the copy to the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed_core.megatron.dropped_storages import will_be_dropped


def sparing_dropped(original: Callable[[Any, torch.Tensor], bool]) -> Callable[[Any, torch.Tensor], bool]:
    """Return the choice of saved tensors that are moved, without those that will be dropped.

    Args:
        original: ``ChunkOffloadHandler.tensor_need_offloading_checker``.
    """

    def tensor_need_offloading_checker(self: Any, tensor: torch.Tensor) -> bool:
        return not will_be_dropped(tensor) and original(self, tensor)

    return tensor_need_offloading_checker


def waiting_for_copies(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the way back that waits for the way to the host.

    Args:
        original: ``ChunkOffloadHandler.reload``.
    """

    def reload(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        stream = torch.cuda.current_stream()
        # The stream of early copies has waited for the event of its group.
        if stream != self.h2d_stream:
            stream.wait_stream(self.d2h_stream)
        return original(self, *args, **kwargs)

    return reload
