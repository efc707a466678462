"""Measurements of a device for the report of a first run: how fast, beside how right.

Each is one number with its unit and what was measured; ``seconds`` is the median of several runs, each waited
for on the host. Where a call fails, its error stands in the place of the number, and the others go on. With
``small`` everything is so small that it shows the file, not the device.
"""

from __future__ import annotations

import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_kernels.measured_calls import BETWEEN_RANKS, CALLS, Make, Sizes

RUNS = 5
"""Timed runs of each measurement, behind two that are not timed."""
_STEPS = 6
_UNITS = ("TFLOP/s", "GB/s", "ms", "x")

Result = dict[str, Any]


def measurements(device: str, folder: Path, *, small: bool = False) -> Iterator[Result]:
    """Measure products, copies, collectives, kernels and a training step.

    Kernels that communicate are measured where there are two ranks or more.

    Args:
        device: type of the device, ``npu``; a world that was started by a launcher takes part with all ranks.
        folder: receives the timeline of the training step.
        small: only see that everything runs.
    """
    yield from _products(device, small)
    yield from _copies(device, small)
    yield from _collectives(device, small)
    yield from _kernels(CALLS, Sizes(device, small))
    yield _training(device, folder, small)


def problems(results: object) -> list[str]:
    """Return what is wrong with the measurements of a file; empty where `measurements` may have made them."""
    if not isinstance(results, list):
        return [f"measurements are a list, not {type(results).__name__}"]
    found = []
    for place, result in enumerate(results):
        if not isinstance(result, dict) or not all(
            isinstance(result.get(name), str) for name in ("measure", "of")
        ):
            found.append(f"measurement {place} has no measure, or does not say of what")
        elif "error" in result:
            if not isinstance(result["error"], str):
                found.append(f"measurement {place}: the error is no text")
        elif result.get("unit") not in _UNITS or not all(
            isinstance(result.get(name), (int, float)) and result[name] >= 0 for name in ("value", "seconds")
        ):
            found.append(f"measurement {place}: value and seconds are numbers, the unit one of {_UNITS}")
    return found


def _products(device: str, small: bool) -> Iterator[Result]:
    for rows, inner, columns in ((8, 8, 8),) if small else ((4096, 4096, 4096), (8192, 4096, 11008)):
        for dtype in (torch.bfloat16, torch.float32):
            name = f"{str(dtype).removeprefix('torch.')} [{rows}, {inner}] x [{inner}, {columns}]"

            def measure(
                rows: int = rows, inner: int = inner, columns: int = columns, dtype: torch.dtype = dtype
            ) -> Result:
                a = torch.randn(rows, inner, dtype=dtype, device=device)
                b = torch.randn(inner, columns, dtype=dtype, device=device)
                seconds = _seconds(lambda: a @ b, device)
                return _result(2 * rows * inner * columns / seconds / 1e12, "TFLOP/s", seconds)

            yield _tried("matmul", name, measure)


def _copies(device: str, small: bool) -> Iterator[Result]:
    size = 1 << (10 if small else 28)
    for pinned in (True, False):
        for inward in (True, False):

            def measure(pinned: bool = pinned, inward: bool = inward) -> Result:
                host = torch.empty(size, dtype=torch.uint8)
                if pinned and device != "cpu":
                    host = host.pin_memory()
                on_device = torch.empty(size, dtype=torch.uint8, device=device)
                source, target = (host, on_device) if inward else (on_device, host)
                seconds = _seconds(lambda: target.copy_(source, non_blocking=True), device)
                return _result(size / seconds / 1e9, "GB/s", seconds)

            direction = "to the device" if inward else "to the host"
            kind = "pinned" if pinned else "pageable"
            yield _tried("host copy", f"{size} bytes {direction}, {kind}", measure)


def _collectives(device: str, small: bool) -> Iterator[Result]:
    size = 1 << (10 if small else 26)
    started = not dist.is_initialized()
    if started:
        try:
            _start_world(device)
        except Exception as error:
            yield {"measure": "all-reduce", "of": "a world", "error": f"{type(error).__name__}: {error}"}
            return
    try:
        ranks = dist.get_world_size()

        def all_reduce() -> Result:
            tensor = torch.ones(size // 4, dtype=torch.float32, device=device)
            seconds = _seconds(lambda: dist.all_reduce(tensor), device)
            # The bandwidth of a ring: every byte goes out and comes in but for a rank's own part.
            return _result(2 * (ranks - 1) / ranks * size / seconds / 1e9, "GB/s", seconds)

        def all_to_all() -> Result:
            sent = torch.ones(size // 4 // ranks * ranks, dtype=torch.float32, device=device)
            received = torch.empty_like(sent)
            seconds = _seconds(lambda: dist.all_to_all_single(received, sent), device)
            return _result((ranks - 1) / ranks * size / seconds / 1e9, "GB/s", seconds)

        yield _tried("all-reduce", f"{size} bytes of float32 on {ranks} ranks", all_reduce)
        yield _tried("all-to-all", f"{size} bytes of float32 on {ranks} ranks", all_to_all)
        if ranks > 1:
            alone = [dist.new_group([rank]) for rank in range(ranks)][dist.get_rank()]
            yield from _kernels(BETWEEN_RANKS, Sizes(device, small, dist.group.WORLD, alone))
    finally:
        if started:
            dist.destroy_process_group()


def _start_world(device: str) -> None:
    backend = {"npu": "hccl", "cuda": "nccl"}.get(device, "gloo")
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _kernels(calls: Mapping[str, Make], sizes: Sizes) -> Iterator[Result]:
    """Compare the backend that serves each call with the reference, forward and backward."""
    for name, make in calls.items():
        yield _tried("kernel", name, functools.partial(_kernel, name, make, sizes))


def _kernel(name: str, make: Make, sizes: Sizes) -> Result:
    from mindspeed_kernels.ops import OPERATORS, use

    call, operator = make(sizes), OPERATORS[name]
    for leaf in call.leaves:
        leaf.requires_grad_()

    def run() -> None:
        found = operator(*call.args, **call.options)
        results = found if isinstance(found, (tuple, list)) else (found,)
        followed = [one for one in results if isinstance(one, Tensor) and one.requires_grad]
        if followed:
            total = torch.stack([one.float().sum() for one in followed]).sum()
            torch.autograd.grad(total, call.leaves, allow_unused=True)

    served = operator.choose(operator.call_of(*call.args, **call.options)).name
    ours = _seconds(run, sizes.device)
    with use(f"{name}=reference"):
        reference = _seconds(run, sizes.device)
    return {**_result(reference / ours, "x", ours), "backend": served, "reference_seconds": reference}


def _training(device: str, folder: Path, small: bool) -> Result:
    """Train a few steps in a process of its own, with the timeline of one where a profiler is installed."""
    size = ("64", "4", "32", "4") if small else ("2048", "16", "4096", "8")
    hidden, heads, length, layers = size
    run = folder / "training"
    command = [
        *(sys.executable, "-m", "mindspeed_core.train", "--platform", device, "--mock-data", "--bf16"),
        *("--hidden-size", hidden, "--num-attention-heads", heads, "--num-layers", layers),
        *("--seq-length", length, "--micro-batch-size", "1", "--global-batch-size", "1", "--lr", "1e-4"),
        *("--train-iters", str(_STEPS), "--eval-iters", "0", "--vocab-size", "1024", "--log-interval", "1"),
        *("--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--use-flash-attn"),
        *("--disable-bias-linear", "--use-fused-rmsnorm", "--use-fused-swiglu", "--num-workers", "0"),
        *("--run-dir", str(run), *_profiled(folder)),
    ]

    def measure() -> Result:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-4000:] or done.stdout[-4000:])
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        times = [record["step_ms"] for record in map(json.loads, lines) if "step_ms" in record]
        # The first two warm up, the last two are those of the profiler.
        seconds = statistics.median(times[2:-2]) / 1e3
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if _is_trace(path))
        return {**_result(1e3 * seconds, "ms", seconds), "timeline": files}

    name = f"hidden size {hidden}, {layers} layers, {length} tokens, bfloat16"
    return _tried("training step", name, measure)


def _profiled(folder: Path) -> Sequence[str]:
    from mindspeed_core.registry import Registry

    if "profile" not in Registry.discover().features:
        return ()
    steps = ("--profile-step-start", str(_STEPS - 2), "--profile-step-end", str(_STEPS - 1))
    return ("--profile", *steps, "--profile-with-cpu", "--profile-save-path", str(folder / "timeline"))


def _is_trace(path: Path) -> bool:
    return path.is_file() and "timeline" in path.parts and path.suffix in (".json", ".gz", ".csv", ".db")


def _tried(measure: str, of: str, run: Callable[[], Result]) -> Result:
    try:
        return {"measure": measure, "of": of, **run()}
    except Exception as error:
        return {"measure": measure, "of": of, "error": f"{type(error).__name__}: {error}"}


def _result(value: float, unit: str, seconds: float) -> Result:
    return {"value": value, "unit": unit, "seconds": seconds}


def _seconds(run: Callable[[], object], device: str) -> float:
    """Return the median time of a call, waited for on the host."""
    times = []
    for number in range(RUNS + 2):
        _wait(device)
        started = time.perf_counter()
        run()
        _wait(device)
        if number > 1:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def _wait(device: str) -> None:
    if device != "cpu":
        torch.get_device_module(device).synchronize()
