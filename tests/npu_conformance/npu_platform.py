"""The platform of the core against the real torch_npu: every call exists and takes what we pass."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from mindspeed_core.runtime.patches import PatchLedger
from mindspeed_megatron.devices.npu import NpuPlatform
from mindspeed_megatron.doctor.probe import probe
from mindspeed_testing.npu import fake_npu, fake_world, value_device

REFUSED = "507899"


def type_of(tensor):
    return tensor.type()


@pytest.fixture
def platform():
    return NpuPlatform()


def test_every_patch_has_a_target_and_a_replacement(platform):
    ledger = PatchLedger()
    ledger.apply(platform.patches(), owner=platform.name)
    try:
        assert torch.cuda._lazy_call is torch.npu._lazy_call
        assert torch.cuda.is_available()
        torch.cuda.nvtx.range_push("a range")
        torch.cuda.nvtx.range_pop()
    finally:
        ledger.revert()


def test_dynamo_has_one_rule_for_a_function_with_two_names(platform, monkeypatch):
    from torch._dynamo import trace_rules
    from torch_npu.dynamo.trace_rule import _patch_npu_trace_rules

    seed = torch.npu.random.manual_seed_all
    # As after joining a world: the transfer has given it this name, and its module can be imported.
    monkeypatch.setattr(torch.cuda.random, "manual_seed_all", seed)
    monkeypatch.setitem(sys.modules, "torch.npu.random", torch.npu.random)
    platform.patches()
    # torch_npu adds its rules when something is compiled first.
    _patch_npu_trace_rules()
    assert seed in trace_rules.get_torch_obj_rule_map()


def test_the_type_of_a_tensor_is_told_to_megatron_in_its_words(platform):
    ledger = PatchLedger()
    ledger.apply(platform.patches(), owner=platform.name)
    try:
        with fake_npu() as npu:
            asked_by_megatron = types.FunctionType(type_of.__code__, {"__name__": "megatron.core.optimizer"})
            assert asked_by_megatron(npu.tensor(2)) == "torch.cuda.BFloat16Tensor"
            assert type_of(npu.tensor(2)) != "torch.cuda.BFloat16Tensor"
    finally:
        ledger.revert()


def test_a_device_has_a_version_that_torch_can_compare(platform, monkeypatch):
    ledger = PatchLedger()
    ledger.apply(platform.patches(), owner=platform.name)
    try:
        assert torch.cuda.get_device_capability() == (0, 0)
        monkeypatch.setenv("TORCH_NPU_DEVICE_CAPABILITY", "8.0")
        assert torch.cuda.get_device_capability(0) == (8, 0)
    finally:
        ledger.revert()


def test_a_world_without_peers_starts_after_cuda_names_were_transferred(platform):
    platform.patches()
    with fake_world(4, rank=1) as group:
        assert (group.rank(), group.size()) == (1, 4)


def test_devices_and_dtypes(platform):
    platform.set_device(0)
    assert platform.device(0) == torch.device("npu", 0)
    assert platform.supported_dtypes() == {torch.float32, torch.float16, torch.bfloat16}


def test_a_device_without_bfloat16_says_so(platform):
    with value_device(soc="310P"):
        assert platform.supported_dtypes() == {torch.float32, torch.float16}


def test_a_device_says_its_model(platform):
    assert platform.device_model(torch.device("npu", 0)).startswith("Ascend")


def test_the_allocator_records_its_blocks_until_told_otherwise(platform):
    # Tests before this one may hold memory.
    held = platform._snapshot()["segments"]
    platform.record_memory()
    try:
        assert platform._snapshot()["segments"] == held
    finally:
        platform.record_memory(0)


def test_a_pool_of_the_allocator_is_made_and_entered(platform):
    entered = False
    with platform.memory_pool()():
        entered = True
    assert entered


def test_the_peak_begins_anew_at_what_is_allocated(platform):
    platform.empty_cache()
    platform.reset_peak_memory()
    assert platform.memory_allocated().bytes == platform.peak_memory().bytes


def limit_memory(platform):
    platform.set_memory_limit(0.5)


def expand_segments(platform):
    platform.allocator_settings("expandable_segments:True")


@pytest.mark.parametrize(
    "act",
    [
        NpuPlatform.total_memory,
        NpuPlatform.memory_used,
        NpuPlatform.synchronize,
        limit_memory,
        expand_segments,
    ],
)
def test_what_needs_a_device_reaches_the_runtime_and_is_refused_there(platform, act):
    with pytest.raises(RuntimeError, match=REFUSED):
        act(platform)


def test_streams_and_events(platform):
    stream = platform.stream(priority=0)
    with platform.use_stream(stream):
        assert platform.current_stream() == stream
    assert platform.event(enable_timing=True) is not None


def test_random_state_is_saved_and_restored(platform):
    torch.npu.manual_seed(7)
    state = platform.rng_state()
    torch.npu.manual_seed(8)
    platform.set_rng_state(state)
    assert torch.equal(platform.rng_state(), state)


def test_the_doctor_sees_the_announced_device():
    assert probe()["npu"] == ["Ascend910B1"]
