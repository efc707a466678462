"""The platform ``fake-npu``: a dry run through the real torch_npu, on a machine without a device."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from mindspeed_core.discovery.installed import installed_version
from mindspeed_core.feature import Patch
from mindspeed_core.platforms.platform import Availability
from mindspeed_megatron.devices.npu import NpuPlatform
from mindspeed_megatron.fake.platform import DryRun

if TYPE_CHECKING:
    from mindspeed_megatron.backend_contracts import BackendContract

STAND_IN = "MINDSPEED_NPU_STUB_DEVICES"
"""Is 1 in a process that was started with the stand-in libraries of the device runtime."""


class Named:
    """The part of a group's backend that operators with built-in communication use."""

    def __init__(self, group: str) -> None:
        """Belong to the group of this name."""
        self._group = group

    def get_hccl_comm_name(self, rank: int, init_comm: bool = True) -> str:
        """Return the communicator's name."""
        return f"fake-{self._group}"


def named_backend(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``ProcessGroup._get_backend``: every group has the name of a communicator."""

    def _get_backend(group: Any, device: Any) -> Named:
        return Named(group.group_name)

    return _get_backend


def posted_one_by_one(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``batch_isend_irecv``: each send and receive is a call of its own, as others count them."""

    @functools.wraps(original)
    def batch_isend_irecv(p2p_op_list: Sequence[Any]) -> list[Any]:
        posted = [one.op(one.tensor, one.peer, one.group, one.tag) for one in p2p_op_list]
        return [work for work in posted if work is not None]

    return batch_isend_irecv


def nothing_to_wait_for(original: Callable[..., Any]) -> Callable[..., None]:
    """Wrap ``synchronize`` and events: nothing runs on the device, and the stand-in runtime has no events."""

    @functools.wraps(original)
    def synchronize(*where: Any, **options: Any) -> None:
        return None

    return synchronize


SYNCHRONIZED = Patch(
    target="torch_npu.npu.utils:synchronize",
    new=f"{__name__}:nothing_to_wait_for",
    kind="wrap",
    reason="megatron-core waits for the device after each batch of messages between pipeline stages",
    also=("torch_npu.npu:synchronize", "torch.cuda:synchronize"),
)
EVENTS = tuple(
    Patch(
        target=f"torch_npu.npu.streams:{method}",
        new=f"{__name__}:nothing_to_wait_for",
        kind="wrap",
        reason="megatron-core copies counts of tokens on a stream of its own, and waits for it",
    )
    for method in ("Event.record", "Event.wait", "Event.synchronize", "Stream.synchronize")
)
BATCHES = Patch(
    target="torch.distributed.distributed_c10d:batch_isend_irecv",
    new=f"{__name__}:posted_one_by_one",
    kind="wrap",
    reason="torch_npu hands a batch to the group's backend, which a group without peers does not have",
    also=("torch.distributed:batch_isend_irecv",),
)
COMMUNICATORS = Patch(
    target="torch.distributed.distributed_c10d:ProcessGroup._get_backend",
    new=f"{__name__}:named_backend",
    kind="wrap",
    reason="operators with built-in communication ask for the name of a communicator",
)


class FakeNpuPlatform(DryRun, NpuPlatform):
    """A dry run like the npu platform; torch_npu's own schemas and shape functions run."""

    name: ClassVar[str] = "fake-npu"
    like: ClassVar[str] = "npu"

    def patches(self) -> Sequence[Patch]:
        """Return the patches of the npu platform and of dry runs, and those of this device."""
        return (*super().patches(), BATCHES, SYNCHRONIZED, *EVENTS, COMMUNICATORS)

    def contracts(self) -> Sequence[BackendContract]:
        """Return HCCL's rules for the generation that the stand-in runtime announces."""
        from mindspeed_megatron.backend_contracts.hccl import contract_for

        return (contract_for(str(self.runtime().get_device_name())),)

    def shapes(self) -> Mapping[str, Callable[..., Any]]:
        """Return shape functions that torch_npu lacks or has wrong."""
        from mindspeed_megatron.fake.npu_shapes import SHAPES

        return SHAPES

    @classmethod
    def probe(cls) -> Availability:
        """Look for torch_npu and for the stand-in libraries; imports nothing."""
        installed = installed_version("torch_npu")
        if not installed:
            return Availability(False, "torch_npu is not installed; --platform fake plans without it")
        if os.environ.get(STAND_IN) != "1":
            reason = (
                "torch_npu runs here only with stand-in libraries of the device runtime; start the program "
                "with python -m mindspeed_testing.npu, or plan with --platform fake"
            )
            return Availability(False, reason)
        return Availability(True, f"a dry run through torch_npu {installed}, with a stand-in runtime")
