"""The platform ``fake-cuda``: a dry run with the kernels that CUDA tensors choose, and NCCL's rules.

Tensors that are labelled ``cuda`` abort a torch that is built without CUDA as soon as they require grad. Here
they are labelled ``cpu``; code that chooses between kernels asks `mindspeed_megatron.planned_kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from mindspeed_core.platforms.platform import OpeningSession
from mindspeed_megatron.fake.platform import FakePlatform
from mindspeed_megatron.planned_kernels import kernels_of

if TYPE_CHECKING:
    from mindspeed_megatron.backend_contracts import BackendContract


class FakeCudaPlatform(FakePlatform):
    """A dry run like the cuda platform, on tensors of the CPU without values."""

    name: ClassVar[str] = "fake-cuda"
    like: ClassVar[str] = "cuda"

    def start(self, session: OpeningSession) -> None:
        """Compute in shapes alone from now on, with the kernels of CUDA."""
        super().start(session)
        assert self._computing is not None
        self._computing.enter_context(kernels_of("cuda"))

    def contracts(self) -> Sequence[BackendContract]:
        """Return NCCL's rules."""
        from mindspeed_megatron.backend_contracts.nccl import NCCL

        return (NCCL,)
