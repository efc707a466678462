"""The cuda and npu platforms, and the choice between platforms."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch

from mindspeed_core.errors import SessionError, UserError
from mindspeed_core.platforms.cpu import CpuPlatform
from mindspeed_core.platforms.platform import Availability, Platform
from mindspeed_core.platforms.selection import choose_platform
from mindspeed_core.runtime.patches import PatchLedger
from mindspeed_megatron.devices import cuda, npu
from mindspeed_megatron.devices.cuda import CudaPlatform
from mindspeed_megatron.devices.npu import NpuPlatform

NPU_NAMES = frozenset(
    [
        "Event",
        "Stream",
        "_lazy_call",
        "_lazy_init",
        "current_stream",
        "device_count",
        "empty_cache",
        "get_rng_state",
        "is_available",
        "is_bf16_supported",
        "max_memory_allocated",
        "mem_get_info",
        "memory",
        "memory_allocated",
        "reset_peak_memory_stats",
        "set_device",
        "set_per_process_memory_fraction",
        "set_rng_state",
        "stream",
        "synchronize",
    ]
)
"""Names of ``torch_npu.npu`` as torch_npu 2.13.0 has them."""


class Runtime(types.ModuleType):
    """A device runtime that records what is called; only the recorded names of torch_npu exist."""

    def __init__(self, available=True):
        super().__init__("torch_npu.npu")
        self.calls = []
        answers = {
            "is_available": available,
            "device_count": 2,
            "mem_get_info": (3, 64),
            "memory_allocated": 5,
        }
        answers |= {"max_memory_allocated": 9, "is_bf16_supported": True}
        for name in NPU_NAMES - {"memory"}:
            setattr(self, name, self._recording(name, answers.get(name)))
        self.memory = types.SimpleNamespace(
            _set_allocator_settings=self._recording("_set_allocator_settings", None)
        )

    def _recording(self, name, answer):
        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return answer

        return call


@pytest.fixture
def runtime(monkeypatch):
    """A process in which torch_npu is installed."""
    runtime = Runtime()
    install(monkeypatch, runtime)
    return runtime


def install(monkeypatch, runtime):
    package = types.ModuleType("torch_npu")
    package.__path__ = []
    package.npu = runtime
    transfer = types.ModuleType("torch_npu.contrib.transfer_to_npu")
    contrib = types.ModuleType("torch_npu.contrib")
    contrib.__path__ = []
    contrib.transfer_to_npu = transfer
    for module in (package, runtime, contrib, transfer):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch, "npu", runtime, raising=False)


@pytest.fixture(params=[NpuPlatform, CudaPlatform])
def platform(request, runtime, monkeypatch):
    platform = request.param()
    monkeypatch.setattr(type(platform), "runtime", lambda self: runtime)
    return platform


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (lambda p: p.set_device(1), ("set_device", (1,), {})),
        (lambda p: p.reset_peak_memory(), ("reset_peak_memory_stats", (), {})),
        (lambda p: p.set_memory_limit(0.5), ("set_per_process_memory_fraction", (0.5,), {})),
        (lambda p: p.empty_cache(), ("empty_cache", (), {})),
        (lambda p: p.synchronize(), ("synchronize", (), {})),
        (lambda p: p.stream(priority=-1), ("Stream", (), {"priority": -1})),
        (lambda p: p.current_stream(), ("current_stream", (), {})),
        (lambda p: p.use_stream("s"), ("stream", ("s",), {})),
        (lambda p: p.event(enable_timing=True), ("Event", (), {"enable_timing": True})),
        (lambda p: p.rng_state(), ("get_rng_state", (), {})),
        (lambda p: p.set_rng_state("state"), ("set_rng_state", ("state",), {})),
    ],
)
def test_accelerators_call_their_runtime(platform, runtime, act, expected):
    act(platform)
    assert runtime.calls[-1] == expected


def test_memory_comes_from_the_allocator_and_says_so(platform):
    assert (platform.memory_allocated().bytes, platform.peak_memory().bytes, platform.total_memory()) == (
        5,
        9,
        64,
    )
    assert platform.memory_allocated().source == f"{platform.name} allocator"


def test_bfloat16_is_offered_where_the_device_has_it(platform, runtime):
    assert torch.bfloat16 in platform.supported_dtypes()
    runtime.is_bf16_supported = lambda: False
    assert torch.bfloat16 not in platform.supported_dtypes()


def test_more_processes_than_devices_is_a_user_error(platform):
    with pytest.raises(UserError, match=rf"local rank 2 has no device, 2 .*{platform.visible_devices}"):
        platform.set_device(2)


def test_every_runtime_name_that_accelerators_use_is_in_torch_cuda():
    assert [name for name in NPU_NAMES if not hasattr(torch.cuda, name)] == []


def test_backends_and_device_types():
    assert (CudaPlatform.backend, NpuPlatform.backend, CpuPlatform.backend) == ("nccl", "hccl", "gloo")
    assert CudaPlatform().device(1) == torch.device("cuda", 1)


def test_npu_transfers_cuda_names_and_mends_what_the_transfer_leaves_out(runtime):
    from torch.cuda import _lazy_call as original

    ledger = PatchLedger()
    platform = NpuPlatform()
    ledger.apply(platform.patches(), owner=platform.name)
    try:
        assert torch.cuda._lazy_call is runtime._lazy_call
        from megatron.core.tensor_parallel import random

        assert random._lazy_call is runtime._lazy_call
        torch.cuda.nvtx.range_push("without nvtx")
    finally:
        ledger.revert()
    assert torch.cuda._lazy_call is random._lazy_call is original


def test_npu_compiles_nothing(runtime):
    ledger = PatchLedger()
    NpuPlatform().open(types.SimpleNamespace(ledger=ledger))
    assert [entry.target for entry in ledger.listing()] == ["torch.compiler:set_stance"]
    ledger.revert()


def test_npu_without_torch_npu_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(
        SessionError, match=r"torch_npu cannot be imported .*install the torch_npu .*set_env.sh"
    ):
        NpuPlatform().patches()


def test_npu_without_a_device_says_what_to_check(monkeypatch):
    install(monkeypatch, Runtime(available=False))
    with pytest.raises(SessionError, match=r"torch.npu.is_available\(\) is False; run CANN's set_env.sh"):
        NpuPlatform().patches()


def test_npu_allocator_takes_expandable_segments_at_run_time(runtime):
    NpuPlatform().allocator_settings("expandable_segments:True")
    assert runtime.calls == [("_set_allocator_settings", ("expandable_segments:True",), {})]


def test_npu_allocator_refuses_what_it_reads_only_at_start(runtime):
    with pytest.raises(UserError, match=r"PYTORCH_NPU_ALLOC_CONF=max_split_size_mb:64 in the environment"):
        NpuPlatform().allocator_settings("max_split_size_mb:64")


def test_cuda_that_does_not_answer_is_an_error_when_opened(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SessionError, match=r"is_available\(\) is False.*--platform cpu"):
        CudaPlatform().open(types.SimpleNamespace())


def test_device_files_are_counted_without_controls(tmp_path: Path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "davinci0", "davinci_manager"):
        (tmp_path / name).touch()
    assert cuda._device_files(tmp_path) == 2
    assert npu.device_files(tmp_path) == 1


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_cuda_devices_are_not_available(monkeypatch, hidden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    found = CudaPlatform.probe()
    assert (found.available, found.reason) == (False, "CUDA_VISIBLE_DEVICES hides every device")


def test_cuda_needs_devices_and_a_build_for_them(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(cuda, "_device_files", lambda directory: 2)
    monkeypatch.setattr(cuda, "_torch_built_for", lambda: "12.6")
    assert CudaPlatform.probe() == Availability(True, "2 NVIDIA device(s), torch built for CUDA 12.6")
    monkeypatch.setattr(cuda, "_torch_built_for", lambda: "")
    assert not CudaPlatform.probe().available
    monkeypatch.setattr(cuda, "_device_files", lambda directory: 0)
    assert CudaPlatform.probe().reason == "no NVIDIA device file in /dev"


def test_cuda_version_of_torch_is_read_from_its_version_file():
    assert cuda._torch_built_for() == (torch.version.cuda or "")


def test_npu_needs_torch_npu_and_devices(monkeypatch):
    monkeypatch.setattr(npu, "installed_version", lambda name: "2.13.0")
    monkeypatch.setattr(npu, "device_files", lambda directory: 8)
    assert NpuPlatform.probe() == Availability(True, "8 Ascend device(s), torch_npu 2.13.0")
    monkeypatch.setattr(npu, "device_files", lambda directory: 0)
    assert not NpuPlatform.probe().available


def stub(name, preference, available=True, reason="it is here"):
    probe = classmethod(lambda cls: Availability(available, reason))
    return type(name, (Platform,), {"name": name, "preference": preference, "probe": probe})


class Installed:
    """A registry of platforms only."""

    def __init__(self, *platforms):
        self.platforms = {platform.name: platform for platform in platforms}

    def platform_names(self):
        return tuple(self.platforms)

    def platform(self, name):
        if name not in self.platforms:
            raise UserError(f"no platform {name!r}")
        return self.platforms[name]


def test_auto_takes_the_available_platform_of_highest_preference():
    installed = Installed(stub("cpu", 0), stub("npu", 20, False, "no device"), stub("cuda", 10))
    name, why = choose_platform("auto", installed)
    assert name == "cuda"
    assert why == "platform cuda: it is here; not npu: no device"


def test_preference_is_npu_then_cuda_then_cpu():
    assert NpuPlatform.preference > CudaPlatform.preference > CpuPlatform.preference


def test_asked_for_platform_wins_over_preference():
    assert choose_platform("cpu", Installed(stub("cpu", 0), stub("npu", 20)))[0] == "cpu"


def test_asked_for_but_unavailable_names_reason_and_alternatives():
    installed = Installed(stub("cpu", 0), stub("npu", 20, False, "torch_npu is not installed"))
    with pytest.raises(UserError, match=r"--platform 'npu': torch_npu is not installed; .*auto.*: cpu$"):
        choose_platform("npu", installed)


def test_unknown_platform_is_a_user_error():
    with pytest.raises(UserError, match="no platform 'tpu'"):
        choose_platform("tpu", Installed(stub("cpu", 0)))


def test_choosing_loads_no_torch():
    import subprocess

    script = (
        "import sys\n"
        "from mindspeed_core.registry import Registry\n"
        "from mindspeed_core.platforms.selection import choose_platform\n"
        "print(choose_platform('auto', Registry.discover())[0], 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split()[1] == "False"
