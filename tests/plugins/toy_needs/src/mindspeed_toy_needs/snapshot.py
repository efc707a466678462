"""A gradient copied to the host on a stream of its own, written once for all platforms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from mindspeed_core.platforms.platform import Platform
    from mindspeed_core.run import Run


class Snapshot:
    """Copies the gradient of the first parameter beside the update."""

    def __init__(self, platform: Platform, run: Run) -> None:
        self.platform, self.run = platform, run
        self.parameter = next(run.model[0].parameters())
        self.stream = platform.stream()
        self.copied: Any = platform.event()
        self.buffer = platform.pinned_empty(self.parameter.shape, self.parameter.main_grad.dtype)

    def start(self) -> None:
        """Launch the copy, and draw a number that training must not notice."""
        platform = self.platform
        self.stream.wait_stream(platform.current_stream())
        with platform.use_stream(self.stream):
            self.buffer.copy_(self.parameter.main_grad, non_blocking=True)
            self.copied.record()
        state = platform.rng_state()
        torch.rand(3, device=self.run.dist.device)
        platform.set_rng_state(state)

    def finish(self) -> None:
        """Wait for the copy and record what it shows."""
        self.copied.synchronize()
        metrics = self.run.metrics
        metrics.add("toy snapshot norm", self.buffer.norm(), "max")
        metrics.add(
            "toy memory share", self.platform.memory_allocated().bytes / self.platform.total_memory(), "max"
        )
        metrics.add("toy asynchronous", float(self.platform.collectives_asynchronous), "max")
        metrics.add("toy dtypes", len(self.platform.supported_dtypes()), "max")
