"""Throughput of a step: TFLOP/s per device, and its share of the device's peak.

The operations come from `flops`. The peak is, in this order: ``--peak-tflops``; the vendor's figure for a
device known by its name, dense, in the training dtype; on CPU the best of a few matrix products of this
process, measured once while the other ranks of the machine measure too, so that a rank's peak is its share of
the machine. A device of unknown name has no peak, and no share is reported.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mindspeed_core.megatron.flops import FlopCount, count_flops, uncounted

if TYPE_CHECKING:
    import torch

    from mindspeed_core.run import Run

# Name fragment: dense TFLOP/s in 16-bit formats and in float32 without TF32, from the vendors' data sheets.
# The first fragment found in the name wins, so longer names come first.
DEVICE_PEAKS: dict[str, tuple[float, float]] = {
    "H100 PCIe": (756.0, 51.0),
    "H100 NVL": (835.0, 60.0),
    "H100": (989.4, 67.0),
    "H200": (989.4, 67.0),
    "H800": (989.4, 67.0),
    "H20": (148.0, 44.0),
    "A100": (312.0, 19.5),
    "A800": (312.0, 19.5),
    "A40": (149.7, 37.4),
    "A30": (165.0, 10.3),
    "A10": (125.0, 31.2),
    "L40S": (362.0, 91.6),
    "L40": (181.0, 90.5),
    "L4": (121.0, 30.3),
    "V100": (125.0, 15.7),
    "T4": (65.0, 8.1),
}
_CPU_SIZE = 768
_CPU_ROUNDS = 5


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

    def figures(self, samples: int, seconds: float, devices: int) -> dict[str, float]:
        """Return ``tflops_per_device``, ``hardware_tflops_per_device`` and ``share_of_peak`` of a step.

        Args:
            samples: sequences of the step over all ranks.
            seconds: wall time of the step.
            devices: number of ranks.
        """
        if self.operations is None or not seconds:
            return {}
        scale = samples / seconds / devices / 1e12
        found = {"tflops_per_device": self.operations.model * scale}
        if self.operations.recomputed:
            found["hardware_tflops_per_device"] = self.operations.hardware * scale
        if self.peak:
            found["share_of_peak"] = found["tflops_per_device"] / self.peak
        return found


def operations_of(run: Run) -> FlopCount | None:
    """Count the operations of one of the run's sequences; None where the formula does not cover its model."""
    if uncounted(run.config):
        return None
    return count_flops(run.config, seq_length=run.args.seq_length, vocab_size=run.args.padded_vocab_size)


def measure_throughput(run: Run) -> Throughput:
    """Gather what the figures need; on CPU without ``--peak-tflops`` this takes some tens of milliseconds."""
    missing = uncounted(run.config)
    if missing:
        return Throughput(None, None, missing)
    peak, source = peak_tflops(run)
    return Throughput(operations_of(run), peak, source)


def peak_tflops(run: Run) -> tuple[float | None, str]:
    """Return TFLOP/s of this rank's device in the training dtype, and where the figure comes from."""
    if run.args.peak_tflops is not None:
        return run.args.peak_tflops, "--peak-tflops"
    dtype, device = run.args.params_dtype, run.dist.device
    if device.type == "cpu":
        return measured_cpu_peak(dtype), f"measured, {_CPU_SIZE} x {_CPU_SIZE} matrix products"
    return named_peak(run.session.platform.device_model(device), dtype)


def named_peak(name: str, dtype: torch.dtype) -> tuple[float | None, str]:
    """Look up the vendor's figure for a device by its name."""
    for fragment, (half, single) in DEVICE_PEAKS.items():
        if fragment in name:
            return half if dtype.itemsize == 2 else single, f"data sheet of {name}"
    return None, f"peak of {name!r} is not known: give --peak-tflops"


def measured_cpu_peak(dtype: torch.dtype) -> float:
    """Measure TFLOP/s: the best of a few square matrix products with this process's threads."""
    import torch

    left = torch.ones(_CPU_SIZE, _CPU_SIZE, dtype=dtype)
    best = float("inf")
    for _ in range(_CPU_ROUNDS):
        started = time.perf_counter()
        torch.mm(left, left)
        best = min(best, time.perf_counter() - started)
    return 2.0 * _CPU_SIZE**3 / best / 1e12
