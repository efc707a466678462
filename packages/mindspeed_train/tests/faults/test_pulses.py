"""The supervisor's view of its workers' pulses."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from mindspeed_megatron.launch import hang
from mindspeed_megatron.launch.hang import Pulse, Pulses


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(hang, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def pulses(clock):
    pulses = Pulses({0: 1, 1: 1})
    for rank in (0, 1):
        speak(pulses, rank)
    pulses.look()
    return pulses


def speak(pulses, rank):
    pulse = Pulse(1, 0.0, limit=3.0, period=0.4)
    pulses.hear(rank, json.dumps(asdict(pulse)).encode() + b"\n")


def test_a_rank_that_says_nothing_while_others_do_is_found(clock, pulses):
    for _ in range(10):
        clock.now += 0.4
        speak(pulses, 1)
        pulses.look()
    assert pulses.finding().rank == 0


def test_a_supervisor_that_was_stopped_with_its_workers_waits_for_all_of_them(clock, pulses):
    clock.now += 5.0
    speak(pulses, 1)
    pulses.look()
    assert pulses.finding() is None
    for _ in range(10):
        clock.now += 0.4
        speak(pulses, 1)
        pulses.look()
    assert pulses.finding().rank == 0
