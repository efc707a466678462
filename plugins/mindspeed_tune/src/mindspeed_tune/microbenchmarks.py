"""Speeds of a device and of its links by operations in a loop: where a calibration begins.

In a loop everything is warm and all ranks meet at once: an all-reduce of 0.2 ms takes 1.4 ms in a step whose
ranks arrive apart. What a training run can tell therefore corrects these numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mindspeed_tune.roofline import sent
from mindspeed_tune.step_plan import UPDATE_BYTES

_PRODUCT, _COPIED, _LAUNCHES, _SENT = 512, 1 << 22, 200, 1 << 22
_UPDATED, _PARAMETERS = 1 << 22, 16
_REPEATED = 5


def measure_speeds(platform: str | None, dtype: str) -> dict[str, Any]:
    """Return the speeds that one world measures; every rank calls it, and all return the same.

    Args:
        platform: name of the platform; None for the best one here.
        dtype: of matrix products, ``bfloat16`` or ``float32``.

    Returns:
        ``flops`` a second of products, ``memory_bandwidth`` in bytes a second, ``update_bandwidth`` of Adam
        in bytes a second, ``launch`` in seconds of a small operator, ``latency`` in seconds of a small
        all-reduce and ``link`` in bytes a second of a large one (both 0 in a world of one), ``collectives``
        with the bytes a second of other large ones as parts of it, ``memory`` in bytes of the device,
        ``name`` of the device, and ``platform``.
    """
    import torch
    import torch.distributed as dist

    from mindspeed_core.platforms.selection import choose_platform
    from mindspeed_core.registry import Registry

    torch.set_num_threads(1)
    registry = Registry.discover()
    name, _ = choose_platform(platform or "auto", registry)
    device_platform: Any = registry.platform(name)()
    place = device_platform.position(None)
    device = device_platform.device(place.local_rank)
    if device.type != "cpu":
        device_platform.set_device(place.local_rank)
    dist.init_process_group("gloo" if device.type == "cpu" else None, init_method="env://")
    try:
        wait = device_platform.synchronize
        kind = getattr(torch, dtype)
        a = torch.ones(_PRODUCT, _PRODUCT, dtype=kind, device=device)
        large = torch.ones(_COPIED, device=device)
        small = torch.ones(8, device=device)
        product = _best(lambda: torch.mm(a, a), wait)
        copied = _best(lambda: large.add(1.0), wait)
        launched = _best(lambda: [small.add(1.0) for _ in range(_LAUNCHES)], wait) / _LAUNCHES
        world = dist.get_world_size()
        updated = _best(_adam(device), wait)
        latency = link = 0.0
        rates: dict[str, float] = {}
        if world > 1:
            latency = _best(lambda: dist.all_reduce(small), wait)
            whole = torch.ones(_SENT // 4 // world * world, device=device)
            part, other = whole[: whole.numel() // world].clone(), torch.empty_like(whole)
            calls: dict[str, Callable[[], object]] = {
                "all_reduce": lambda: dist.all_reduce(whole),
                "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
                "all_gather": lambda: dist.all_gather_into_tensor(other, part),
                "all_to_all": lambda: dist.all_to_all_single(other, whole),
            }
            size = 4.0 * whole.numel()
            for operation, call in calls.items():
                given = size / world if operation == "all_gather" else size
                rates[operation] = sent(operation, world, given) / max(1e-9, _best(call, wait) - latency)
            link = rates["all_reduce"]
        found = [
            2.0 * _PRODUCT**3 / product,
            2 * large.numel() * 4 / copied,
            launched,
            latency,
            link,
            UPDATE_BYTES * _UPDATED / updated,
            *rates.values(),
        ]
        # The slowest rank counts: all wait for it.
        signed = [found[0], found[1], -found[2], -found[3], *found[4:]]
        shared = torch.tensor(signed, dtype=torch.float64)
        shared = shared.to(device)
        dist.all_reduce(shared, op=dist.ReduceOp.MIN)
        flops, bandwidth, launch, late, links, updates, *others = shared.tolist()
        return {
            "flops": flops,
            "memory_bandwidth": bandwidth,
            "update_bandwidth": updates,
            "launch": -launch,
            "latency": -late,
            "link": links,
            "collectives": {
                operation: rate / links for operation, rate in zip(rates, others) if operation != "all_reduce"
            },
            "memory": float(device_platform.total_memory()),
            "name": device_platform.device_model(device) or name,
            "platform": name,
        }
    finally:
        dist.destroy_process_group()


def _adam(device: Any) -> Callable[[], object]:
    """Return an update of parameters in float32, as the optimizer of torch makes it."""
    import torch

    parameters = [
        torch.nn.Parameter(torch.ones(_UPDATED // _PARAMETERS, device=device)) for _ in range(_PARAMETERS)
    ]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return torch.optim.AdamW(parameters, lr=1e-3).step


def _best(action: Callable[[], object], wait: Callable[[], None]) -> float:
    """Return the shortest of several times of an action, behind one that warms up."""
    times = []
    for _ in range(_REPEATED + 1):
        wait()
        began = time.perf_counter()
        action()
        wait()
        times.append(time.perf_counter() - began)
    return min(times[1:])
