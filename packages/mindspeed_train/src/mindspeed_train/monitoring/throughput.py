"""Throughput of a step: TFLOP/s per device, and its share of the device's peak.

The operations come from `flops`, the peak from `device_peak`; where there is none, no share is reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mindspeed_megatron.flops import FlopCount, count_run, uncounted
from mindspeed_megatron.instruments.device_peak import peak_tflops

if TYPE_CHECKING:
    from mindspeed_core.run import Run
    from mindspeed_megatron.padding import StepWork


@dataclass(frozen=True)
class Throughput:
    """The numbers that the figures of a run are computed from.

    Attributes:
        operations: of one sequence; None where the formula does not cover the model.
        peak: TFLOP/s of one device, None where it is not known.
        source: where ``peak`` comes from, or why a figure is missing.
    """

    operations: FlopCount | None
    peak: float | None
    source: str

    def figures(
        self, samples: int, seconds: float, devices: int, work: StepWork | None = None
    ) -> dict[str, float]:
        """Return ``tflops_per_device``, ``hardware_tflops_per_device`` and ``share_of_peak`` of a step.

        Args:
            samples: sequences of the step over all ranks.
            seconds: wall time of the step.
            devices: number of ranks.
            work: of a step whose samples are filled up, in place of ``samples``.
        """
        if self.operations is None or not seconds:
            return {}
        scale = 1.0 / seconds / devices / 1e12
        model, hardware = self.operations.model * samples, self.operations.hardware * samples
        if work is not None and work.model is not None and work.hardware is not None:
            model, hardware = work.model, work.hardware
        found = {"tflops_per_device": model * scale}
        if self.operations.recomputed:
            found["hardware_tflops_per_device"] = hardware * scale
        if self.peak:
            found["share_of_peak"] = found["tflops_per_device"] / self.peak
        return found


def operations_of(run: Run) -> FlopCount | None:
    """Count the operations of one of the run's sequences; None where the formula does not cover its model."""
    if uncounted(run.config):
        return None
    return count_run(run, run.args.seq_length)


def measure_throughput(run: Run) -> Throughput:
    """Gather what the figures need; on CPU without ``--peak-tflops`` this takes some tens of milliseconds."""
    missing = uncounted(run.config)
    if missing:
        return Throughput(None, None, missing)
    peak, source = peak_tflops(run)
    return Throughput(operations_of(run), peak, source)
