"""The cuda platform on its device: every method that tests without a device can only record.

In a smoke run the cpu platform answers the same questions.
"""

from __future__ import annotations

import pickle
import tempfile
import time
from pathlib import Path

import torch
from report import Report

from mindspeed_core.activation import activate
from mindspeed_core.errors import UserError
from mindspeed_core.platforms.platform import Platform
from mindspeed_core.registry import Registry
from mindspeed_testing.compare import compare_tensors
from mindspeed_testing.compare_sides import compare_sides
from mindspeed_testing.leak_check import ProcessState
from mindspeed_testing.training import train_side
from mindspeed_testing.verify import assert_equivalent

_MIB = 2**20
_SECONDS = 60.0
"""After which a training that hangs is given up."""

_FUSED = ("--use-fused-rmsnorm", "--use-fused-swiglu", "--use-flash-attn")
_LLAMA = (*"--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope".split(),)


def measure(report: Report) -> None:
    """Check the platform, then trainings on it."""
    kind = Registry.discover().platform(report.platform)
    platform = kind()
    with report.check("the platform is available") as found:
        availability = kind.probe()
        found["reason"] = availability.reason
        assert availability.available, availability.reason
    trainings(report)
    device(report, platform)
    streams_and_events(report, platform)
    buffers_and_random_state(report, platform)
    memory(report, platform)
    sessions(report)
    failed = sum(row["passed"] is False for row in report.rows)
    report.headline = f"{failed} of {len(report.rows)} checks failed"


def trainings(report: Report) -> None:
    """Compare trainings on the device with those on CPU, and with themselves."""
    with report.check("a forked rank trains on the device"):
        side = train_side(_LLAMA, 1, 2, platform=report.platform, timeout=_SECONDS)
    if report.rows[-1]["passed"]:
        with report.check("float32 training equals the one on CPU") as found:
            other = train_side(_LLAMA, 1, 2, initial=side.initial, platform="cpu", timeout=_SECONDS)
            comparison, _ = compare_sides(side, other, tolerance=1e-3)
            found["largest_error"] = comparison.largest
            assert comparison.equal, [str(difference) for difference in comparison.failures()[:5]]
    with report.check("deterministic algorithms give equal bits twice"):
        flags = (*_LLAMA, *_FUSED, "--npu-deterministic")
        first = train_side(flags, 1, 3, platform=report.platform, timeout=_SECONDS)
        second = train_side(flags, 1, 3, initial=first.initial, platform=report.platform, timeout=_SECONDS)
        comparison = compare_tensors(
            second.parameters.tensors, first.parameters.tensors, tolerance=0.0, quantity="parameters"
        )
        assert comparison.equal, [str(difference) for difference in comparison.failures()[:5]]
    with report.check("bfloat16 with a distributed optimizer equals one without"):
        bf16 = (*_LLAMA, "--bf16")
        assert_equivalent(
            (*bf16, "--use-distributed-optimizer"),
            bf16,
            tolerance=2e-2,
            platform=report.platform,
            timeout=_SECONDS,
        )


def device(report: Report, platform: Platform) -> None:
    """Check the device of a process, and what is said where there is none."""
    with report.check("device of the first process"):
        platform.set_device(0)
        assert torch.ones(2, device=platform.device(0)).sum().item() == 2.0
    with report.check("the place of the first process") as found:
        place = platform.place(0)
        found["place"] = str(place)
        assert place.node
        assert place.model
    if not report.smoke:
        with report.check("more processes than devices is a user error"):
            refused = ""
            try:
                platform.set_device(torch.cuda.device_count())
            except UserError as error:
                refused = str(error)
            assert platform.visible_devices in refused, refused or "the device was set"
    with report.check("dtypes") as found:
        found["dtypes"] = ", ".join(sorted(str(dtype) for dtype in platform.supported_dtypes()))
        for dtype in platform.supported_dtypes():
            square = torch.eye(64, dtype=dtype, device=platform.device(0))
            assert (square @ square).trace().item() == 64.0


def streams_and_events(report: Report, platform: Platform) -> None:
    """Check order between streams, and the device's clock against the host's."""
    size = 256 if report.smoke else 4096
    square = torch.full((size, size), 1.0 / size, device=platform.device(0))
    with report.check("a side stream waits, and is waited for"):
        side, total = platform.stream(priority=-1), torch.zeros_like(square)
        current = platform.current_stream()
        for step in range(20):
            total.add_(square @ square)
            side.wait_stream(current)
            with platform.use_stream(side):
                total.mul_(1.0 if step % 2 else 2.0)
            current.wait_stream(side)
        expected = 0.0
        for step in range(20):
            expected = (expected + 1.0 / size) * (1.0 if step % 2 else 2.0)
        platform.synchronize()
        assert abs(total.mean().item() / expected - 1.0) < 1e-3
    with report.check("an event orders two streams") as found:
        side, done, written = platform.stream(), platform.event(), torch.zeros_like(square)
        platform.synchronize()
        with platform.use_stream(side):
            for _ in range(20):
                square @ square
            written.fill_(1.0)
            done.record(side)
        done.wait(platform.current_stream())
        copied = written.clone()
        done.synchronize()
        found["finished"] = bool(done.query())
        assert found["finished"]
        assert copied.mean().item() == 1.0
    with report.check("events measure what the host's clock measures") as found:
        begin, end = (platform.event(enable_timing=True) for _ in range(2))
        platform.synchronize()
        started = time.perf_counter()
        begin.record()
        for _ in range(20):
            square @ square
        end.record()
        end.synchronize()
        host = (time.perf_counter() - started) * 1e3
        elapsed = begin.elapsed_time(end)
        found |= {"device_ms": elapsed, "host_ms": host}
        assert 0.5 * host < elapsed <= 1.05 * host


def buffers_and_random_state(report: Report, platform: Platform) -> None:
    """Check page-locked buffers and the generator of the device."""
    with report.check("pinned buffers carry data both ways") as found:
        buffer = platform.pinned_empty((_MIB,), torch.float32)
        found["pinned"] = buffer.is_pinned()
        assert buffer.is_pinned() is (not report.smoke)
        buffer.normal_()
        moved = buffer.to(platform.device(0), non_blocking=True)
        back = platform.pinned_empty((_MIB,), torch.float32)
        back.copy_(moved, non_blocking=True)
        platform.synchronize()
        assert torch.equal(back, buffer)
    with report.check("the random state is saved and restored"):
        state = platform.rng_state()
        assert (state.dtype, state.device.type) == (torch.uint8, "cpu")
        first = torch.rand(1000, device=platform.device(0))
        second = torch.rand(1000, device=platform.device(0))
        platform.set_rng_state(state)
        assert torch.equal(torch.rand(1000, device=platform.device(0)), first)
        assert not torch.equal(first, second)


def memory(report: Report, platform: Platform) -> None:
    """Check memory figures, the limit and the allocator's settings."""
    size = (32 if report.smoke else 512) * _MIB
    with report.check("memory figures follow an allocation") as found:
        platform.empty_cache()
        platform.reset_peak_memory()
        before = platform.memory_allocated()
        block = torch.ones(size, dtype=torch.uint8, device=platform.device(0))
        platform.synchronize()
        held = platform.memory_allocated().bytes - before.bytes
        del block
        peak = platform.peak_memory().bytes - before.bytes
        found |= {"source": before.source, "asked": size, "held": held, "peak": peak}
        # Memory of a process grows by pages, and may have had some free.
        slack = size // 4 if report.smoke else 0
        assert held >= size - slack
        assert peak >= size - slack
        assert platform.total_memory() > size
    with report.check("a snapshot of memory names who allocated") as found:
        platform.record_memory()
        block = torch.ones(size, dtype=torch.uint8, device=platform.device(0))
        with tempfile.TemporaryDirectory() as folder:
            path = platform.memory_snapshot(Path(folder) / "snapshot.pickle")
            snapshot = pickle.loads(path.read_bytes())  # noqa: S301 - written by this process
        platform.record_memory(entries=0)
        del block
        events = [event for trace in snapshot["device_traces"] for event in trace]
        found["events"] = len(events)
        (allocated,) = (event for event in events if event["action"] == "alloc" and event["size"] >= size)
        assert any(frame["name"] == "memory" for frame in allocated["frames"])
    if report.smoke:
        return
    with report.check("an emptied cache returns blocks to the device"):
        block = torch.ones(size, dtype=torch.uint8, device=platform.device(0))
        del block
        reserved = torch.cuda.memory_reserved()
        platform.empty_cache()
        assert torch.cuda.memory_reserved() <= reserved - size
    with report.check("the memory limit holds and is lifted"):
        platform.empty_cache()
        platform.set_memory_limit(size / 2 / platform.total_memory())
        try:
            torch.ones(size, dtype=torch.uint8, device=platform.device(0))
        except torch.OutOfMemoryError:
            pass
        else:
            raise AssertionError("more than the limit was allocated")
        finally:
            platform.set_memory_limit(1.0)
        torch.ones(size, dtype=torch.uint8, device=platform.device(0))
    with report.check("the allocator takes settings and refuses unknown ones"):
        platform.allocator_settings("max_split_size_mb:128")
        platform.allocator_settings("expandable_segments:True")
        grown = torch.ones(size, dtype=torch.uint8, device=platform.device(0))
        assert int(grown[-1]) == 1
        try:
            platform.allocator_settings("no_such_setting:1")
        except (RuntimeError, ValueError):
            pass
        else:
            raise AssertionError("an unknown setting was taken")


def sessions(report: Report) -> None:
    """Check that sessions on the device leave torch and megatron-core as they were."""
    flags = ["--use-flash-attn"]
    # What is imported on first use is no residue.
    activate(flags, platform=report.platform).close()
    with report.check("open and closed sessions leave torch and megatron as they were"):
        for _ in range(3):
            before = ProcessState.now()
            activate(flags, platform=report.platform).close()
            left = ProcessState.now().left_since(before)
            assert not left, left[:5]
