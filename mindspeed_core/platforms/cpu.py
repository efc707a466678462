"""The CPU as a device: any machine trains.

megatron-core names cuda in its source; mindspeed-megatron brings the patches that let those calls mean the
CPU, as the part ``patches_of_cpu``.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from mindspeed_core.discovery.parts import part_if_installed
from mindspeed_core.errors import ArgumentError
from mindspeed_core.feature import Patch
from mindspeed_core.platforms import process_memory
from mindspeed_core.platforms.platform import Availability, MemoryFigure, OpeningSession, Platform

if TYPE_CHECKING:
    import logging

_RNG_LOGGERS = (
    "megatron.core.tensor_parallel.random",
    "megatron.core.distributed.fsdp.src.megatron_fsdp.utils",
)
_REFUSED = (
    ("ddp_average_in_collective", (True,), "gloo has no averaging reduction", "leave it out"),
    ("cuda_graph_impl", ("local", "transformer_engine"), "there are no graphs on CPU", "use none"),
    ("enable_cuda_graph", (True,), "there are no graphs on CPU", "leave it out"),
    ("external_cuda_graph", (True,), "there are no graphs on CPU", "leave it out"),
)


class CpuPlatform(Platform):
    """The CPU, with gloo.

    The device's random generator is torch's default CPU generator: what is seeded, forked and restored as
    "cuda state" is what dropout draws from. ``torch.compile`` runs eagerly while the session is open:
    compiling for CPU takes minutes and changes bits.
    """

    name: ClassVar[str] = "cpu"
    device_type: ClassVar[str] = "cpu"
    backend: ClassVar[str] = "gloo"
    preference: ClassVar[int] = 0
    collectives_asynchronous: ClassVar[bool] = False
    # gloo copies the input of the one and gathers the other into a buffer of its own.
    backend_temporaries: ClassVar[Mapping[str, float]] = {
        "reduce_scatter_tensor": 1.0,
        "all_gather_into_tensor": 1.0,
    }

    @classmethod
    def probe(cls) -> Availability:
        """Answer that every machine has a CPU."""
        return Availability(True, "every machine has a CPU")

    def patches(self) -> Sequence[Patch]:
        """Return the emulation of ``torch.cuda``; nothing without mindspeed-megatron, whose hosts need it.

        Raises:
            SessionError: this process already uses a device whose tensors the emulation would redirect.
        """
        patches = part_if_installed("patches_of_cpu")
        return () if patches is None else tuple(patches())

    def check_arguments(self, args: Namespace) -> None:
        """Refuse a flag that asks for something that a CPU does not have."""
        for name, values, reason, remedy in _REFUSED:
            value = getattr(args, name, None)
            if value in values:
                raise ArgumentError(
                    "--" + name.replace("_", "-"), value, reason, f"{remedy} with --platform cpu"
                )

    def open(self, session: OpeningSession) -> None:
        """Run ``torch.compile``d functions eagerly and drop the warning about the shared generator."""
        hold_eager(
            session,
            owner=self.name,
            reason="compiling for CPU takes minutes and is not bit-identical to eager execution",
        )
        from logging import getLogger

        for logger in map(getLogger, _RNG_LOGGERS):
            session.ledger.setting(
                f"logging:{logger.name}.filters",
                lambda logger=logger: logger.addFilter(_is_informative),  # type: ignore[misc]
                lambda logger=logger: logger.removeFilter(_is_informative),  # type: ignore[misc]
                owner=self.name,
                reason="device and host share one generator, a fork always looks like a change of both",
            )

    def memory_allocated(self) -> MemoryFigure:
        """Return the resident bytes of this process."""
        return MemoryFigure(process_memory.resident_bytes(), process_memory.SOURCE)

    def peak_memory(self) -> MemoryFigure:
        """Return the peak resident bytes since `reset_peak_memory`, where Linux permits resetting."""
        return MemoryFigure(process_memory.peak_resident_bytes(), process_memory.SOURCE)

    def reset_peak_memory(self) -> None:
        """Start a new peak; without permission to, the peak stays that of the whole process."""
        process_memory.reset_peak()

    def memory_used(self) -> MemoryFigure:
        """Return the bytes of the machine that are in use, by whatever process."""
        used = process_memory.physical_bytes() - process_memory.available_bytes()
        return MemoryFigure(used, "memory of the machine")

    def total_memory(self) -> int:
        """Return the bytes that a process may have; all processes of the machine share them."""
        return process_memory.attainable_bytes()


def hold_eager(session: OpeningSession, *, owner: str, reason: str) -> None:
    """Run ``torch.compile``d functions eagerly until the session closes, also those decorated long before."""
    import torch

    stances: list[Any] = []
    session.ledger.setting(
        "torch.compiler:set_stance",
        lambda: stances.append(torch.compiler.set_stance("force_eager")),
        lambda: stances.pop().__exit__(None, None, None),
        owner=owner,
        reason=reason,
    )


def _is_informative(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed within GPU RNG context" not in str(record.msg)
