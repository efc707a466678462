"""Peak of a device in TFLOP/s: given, from the vendor's data sheet by its name, or on CPU measured.

A device of unknown name has no peak. The CPU's is the best of a few matrix products of this process, measured
while the other ranks of the machine measure too, so that a rank's peak is its share of the machine.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

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


def peak_tflops(run: Run) -> tuple[float | None, str]:
    """Return TFLOP/s of this rank's device in the training dtype, and where the figure comes from."""
    given = getattr(run.args, "peak_tflops", None)
    if given is not None:
        return given, "--peak-tflops"
    dtype = getattr(run.args, "params_dtype", None) or run.config.params_dtype
    device = run.dist.device
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
