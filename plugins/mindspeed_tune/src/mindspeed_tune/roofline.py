"""Seconds of operations and of communication on a device, from its peaks.

A matrix product takes the longer of computing and reading, any other operator the time of its bytes, and
none less than its launch. Estimates, not measurements: the hardware file says which of its numbers are.
"""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_megatron.instruments.operations import ATTENTION, BYTES, MATRIX, OPERATORS
from mindspeed_tune.hardware import Hardware
from mindspeed_tune.record import Group

ELEMENT = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


def seconds(work: Mapping[str, float], hardware: Hardware) -> float:
    """Return how long operations take on a device."""
    total = 0.0
    for quantity, count in work.items():
        words = quantity.split()
        if words[0] == MATRIX:
            m, n, k = map(int, words[2:])
            total += count * _product(words[1], m, n, k, hardware)
        elif words[0] == ATTENTION:
            total += count / (hardware.flops.get(words[1], hardware.flops["float32"]) * hardware.attention)
    moved = work.get(BYTES, 0.0) / (hardware.memory_bandwidth * hardware.memory_share)
    return total + max(moved, work.get(OPERATORS, 0.0) * hardware.launch)


def _product(dtype: str, m: int, n: int, k: int, hardware: Hardware) -> float:
    peak = hardware.flops.get(dtype, hardware.flops["float32"])
    computed = 2.0 * m * n * k / (peak * hardware.matrix)
    read = ELEMENT.get(dtype, 2) * (m * k + k * n + m * n) / hardware.memory_bandwidth
    return max(computed, read, hardware.launch)


def sent(operation: str, size: int, input_bytes: float) -> float:
    """Return the bytes that a rank puts on the wire with a ring, or directly.

    Args:
        operation: name of the collective.
        size: ranks of the group.
        input_bytes: of this rank.
    """
    others = size - 1
    if operation == "all_reduce":
        return 2 * input_bytes * others / size
    if operation.startswith("all_gather"):
        return input_bytes * others
    if operation in ("send", "isend", "recv", "irecv", "barrier"):
        return input_bytes
    return input_bytes * others / size


def communication_seconds(
    operation: str, group: Group, calls: float, input_bytes: float, hardware: Hardware
) -> float:
    """Return how long calls of one operation in a group take, one after another."""
    if group.ranks.size == 1 and operation not in ("send", "isend", "recv", "irecv"):
        return 0.0
    crosses = group.ranks.crosses(hardware.devices)
    moved = sent(operation, group.ranks.size, input_bytes) / hardware.bandwidth(crosses, operation)
    return moved + calls * hardware.latency(crosses)
