"""Functions of ``torch.cuda`` on the lagging platform: streams, events and pinned memory are the device's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from mindspeed_core.feature import Patch
from mindspeed_testing.lagging.device import LaggingDevice

_REASON = "streams and events of torch.cuda are those of the lagging device"


def runtime_patches(device: LaggingDevice) -> dict[str, Patch]:
    """Return patches by target, in the place of those of the cpu platform.

    Args:
        device: of the session.
    """

    def new_stream(cls: type, *args: Any, **kwargs: Any) -> Any:
        return device.stream(priority=int(kwargs.get("priority", 0)))

    def new_external_stream(cls: type, stream_ptr: Any, device_: Any = None, **kwargs: Any) -> Any:
        return device.stream()

    def new_event(cls: type, enable_timing: bool = False, *args: Any, **kwargs: Any) -> Any:
        return device.event(enable_timing)

    def current_stream(device_: Any = None) -> Any:
        return device.current()

    def default_stream(device_: Any = None) -> Any:
        return device.main

    def stream(stream: Any) -> AbstractContextManager[Any]:
        return device.on(stream)

    def set_stream(stream: Any) -> None:
        device.set_stream(stream)

    def synchronize(device_: Any = None) -> None:
        device.synchronize()

    def record_stream(self: torch.Tensor, stream: Any) -> None:
        device.record_stream(self, stream)

    def pin_memory(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if device.is_pinned(self) else device.pin(self.clone())

    def is_pinned(self: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
        return device.is_pinned(self)

    def cuda(
        self: torch.Tensor, device_: Any = None, non_blocking: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        if not device.is_pinned(self):
            return self
        host_copy = torch.empty_strided(tuple(self.shape), self.stride(), dtype=self.dtype)
        return host_copy.copy_(self, non_blocking=non_blocking)

    replaced: dict[str, Callable[..., Any]] = {
        "torch.cuda.streams:Stream.__new__": new_stream,
        "torch.cuda.streams:ExternalStream.__new__": new_external_stream,
        "torch.cuda.streams:Event.__new__": new_event,
        "torch.cuda:current_stream": current_stream,
        "torch.cuda:default_stream": default_stream,
        "torch.cuda:stream": stream,
        "torch.cuda:set_stream": set_stream,
        "torch.cuda:synchronize": synchronize,
        "torch:Tensor.record_stream": record_stream,
        "torch:Tensor.pin_memory": pin_memory,
        "torch:Tensor.is_pinned": is_pinned,
        "torch:Tensor.cuda": cuda,
    }
    return {
        target: Patch(target=target, new=new, reason=_REASON, required=False)
        for target, new in replaced.items()
    }
