"""Streams and events of a machine without a device runtime."""

from __future__ import annotations

import pytest

from mindspeed_core.platforms.platform import Platform
from mindspeed_core.platforms.streams import HostEvent, HostStream


def test_stream_answers_what_device_code_asks():
    stream = HostStream(device="cuda", priority=-1)
    stream.wait_stream(HostStream())
    stream.wait_event(HostEvent())
    stream.synchronize()
    assert stream.query()
    assert stream.priority == -1


def test_stream_records_the_event_it_is_given():
    event = HostEvent(enable_timing=True)
    assert HostStream().record_event(event) is event


def test_elapsed_time_is_milliseconds_between_records(monkeypatch):
    clock = iter([1.0, 1.25])
    monkeypatch.setattr("mindspeed_core.platforms.streams.time.perf_counter", lambda: next(clock))
    start, end = HostEvent(enable_timing=True), HostEvent(enable_timing=True)
    start.record()
    end.record()
    assert start.elapsed_time(end) == 250.0


def test_elapsed_time_without_timing_is_an_error_as_on_a_device():
    start, end = HostEvent(), HostEvent(enable_timing=True)
    start.record()
    end.record()
    with pytest.raises(RuntimeError, match="enable_timing=True"):
        start.elapsed_time(end)


def test_elapsed_time_before_recording_is_an_error():
    with pytest.raises(RuntimeError, match="recorded"):
        HostEvent(enable_timing=True).elapsed_time(HostEvent(enable_timing=True))


def test_base_platform_hands_out_host_streams():
    platform = Platform()
    stream = platform.stream(priority=2)
    with platform.use_stream(stream) as used:
        assert used is stream
    assert platform.event(enable_timing=True).enable_timing
