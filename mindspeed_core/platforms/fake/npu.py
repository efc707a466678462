"""The platform ``fake-npu``: a dry run through the real torch_npu, on a machine without a device."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

from mindspeed_core.feature import Patch
from mindspeed_core.platforms.fake.platform import DryRun
from mindspeed_core.platforms.npu import NpuPlatform
from mindspeed_core.platforms.platform import Availability

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
        """Return the patches of the npu platform and of dry runs, and names of communicators."""
        return (*super().patches(), COMMUNICATORS)

    def shapes(self) -> Mapping[str, Callable[..., Any]]:
        """Return shape functions that torch_npu lacks or has wrong."""
        from mindspeed_core.platforms.fake.npu_shapes import SHAPES

        return SHAPES

    @classmethod
    def probe(cls) -> Availability:
        """Look for torch_npu and for the stand-in libraries; imports nothing."""
        try:
            installed = version("torch_npu")
        except PackageNotFoundError:
            return Availability(False, "torch_npu is not installed; --platform fake plans without it")
        if os.environ.get(STAND_IN) != "1":
            reason = (
                "torch_npu runs here only with stand-in libraries of the device runtime; start the program "
                "with python -m mindspeed_testing.npu, or plan with --platform fake"
            )
            return Availability(False, reason)
        return Availability(True, f"a dry run through torch_npu {installed}, with a stand-in runtime")
