"""Platforms say where a process computes, and record what it allocates."""

import os
import pickle
import socket
import stat

import pytest
import torch

from mindspeed_core.errors import SessionError
from mindspeed_core.platforms.accelerator import AcceleratorPlatform
from mindspeed_core.platforms.cpu import CpuPlatform
from mindspeed_core.platforms.machine import first_match
from mindspeed_core.platforms.platform import Place
from mindspeed_megatron.devices.cuda import CudaPlatform


@pytest.fixture
def recording():
    platform = CpuPlatform()
    platform.record_memory()
    yield platform
    platform.close(None)


def grow():
    return torch.zeros(1000) + 1


def events(path):
    with open(path, "rb") as file:
        return pickle.load(file)["device_traces"][0]


def test_the_snapshot_names_who_allocated_what(recording, tmp_path):
    kept = grow()
    found = events(recording.memory_snapshot(tmp_path / "deep" / "snapshot.pickle"))
    assert [(event["action"], event["size"]) for event in found] == [
        ("alloc", 4000),
        ("alloc", 4000),
        ("free_completed", 4000),
    ]
    first = found[0]["frames"][0]
    assert (first["name"], first["filename"]) == ("grow", __file__)
    assert found[0]["addr"] == found[2]["addr"] != found[1]["addr"]
    del kept


def test_resized_storages_are_released_and_allocated(recording, tmp_path):
    swapped = torch.ones(10)
    swapped.untyped_storage().resize_(0)
    swapped.untyped_storage().resize_(40)
    found = events(recording.memory_snapshot(tmp_path / "snapshot.pickle"))
    assert [event["action"] for event in found] == ["alloc", "free_completed", "alloc"]


def test_only_the_last_events_are_kept(tmp_path):
    platform = CpuPlatform()
    platform.record_memory(entries=2)
    for size in range(1, 5):
        torch.zeros(size)
    found = events(platform.memory_snapshot(tmp_path / "snapshot.pickle"))
    platform.record_memory(entries=0)
    assert [event["size"] for event in found] == [16, 16]
    torch.zeros(1)
    with pytest.raises(SessionError, match="call record_memory"):
        platform.memory_snapshot(tmp_path / "another.pickle")


def test_others_may_read_a_snapshot_as_the_user_allows(recording, tmp_path):
    before = os.umask(0o022)
    try:
        path = recording.memory_snapshot(tmp_path / "snapshot.pickle")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert os.listdir(tmp_path) == ["snapshot.pickle"]


def test_a_recording_ends_with_its_session():
    from mindspeed_core.activation import prepare
    from mindspeed_testing.model_flags import training_flags

    with prepare(training_flags([], 1), platform="cpu", host="standalone") as session:
        session.platform.record_memory()
        history = session.platform._recorded
        torch.zeros(1)
    count = len(history.events)
    torch.zeros(1)
    assert count == len(history.events) > 0


def test_a_recording_that_ends_inside_another_mode_lets_it_work(tmp_path):
    from mindspeed_megatron.instruments.memory import TensorBytes

    platform = CpuPlatform()
    with TensorBytes() as outer:
        platform.record_memory()
        with TensorBytes():
            platform.record_memory(entries=0)
        kept = torch.zeros(10)
        assert outer.alive == 40
    del kept
    assert torch._C._len_torch_dispatch_stack() == 0


class Runtime:
    """Record what a device's runtime is asked."""

    def __init__(self):
        self.memory = self
        self.asked = []

    def _record_memory_history(self, **options):
        self.asked.append(options)

    def _snapshot(self):
        return {"segments": ["of the allocator"], "device_traces": [[]]}

    def get_device_name(self, device):
        return f"Acme {device.index}"


class Device(AcceleratorPlatform):
    name, device_type = "device", "cuda"

    def __init__(self):
        self.asked_of = Runtime()

    def runtime(self):
        return self.asked_of


def test_a_device_s_allocator_records_its_blocks(tmp_path):
    platform = Device()
    platform.record_memory(entries=7)
    path = platform.memory_snapshot(tmp_path / "snapshot.pickle")
    platform.close(None)
    assert pickle.loads(path.read_bytes())["segments"] == ["of the allocator"]
    assert platform.asked_of.asked == [
        {"enabled": "all", "stacks": "python", "max_entries": 7},
        {"enabled": None},
    ]


def test_a_place_names_node_device_and_model(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert Device().place() == Place(socket.gethostname(), 3, "cuda:3", "Acme 3")
    here = CpuPlatform().place(1)
    assert (here.local_rank, here.device, here.driver) == (1, "cpu", "")
    assert here.model


def test_a_place_reads_as_one_line():
    assert str(Place("node-7", 3, "cuda:3", "H200", "550.54")) == "cuda:3 (H200, driver 550.54) on node-7"
    assert str(Place("node-7", 0, "cpu", "")) == "cpu on node-7"


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build",
    ],
)
def test_the_driver_is_read_from_its_own_file(text, tmp_path, monkeypatch):
    file = tmp_path / "version"
    file.write_text(text, encoding="utf-8")
    monkeypatch.setattr(
        "mindspeed_megatron.devices.cuda.first_match", lambda path, pattern: first_match(file, pattern)
    )
    assert CudaPlatform().driver() == "550.54.15"
