"""The cpu platform: what megatron's cuda calls answer while it is open, and that a GPT trains under it."""

from __future__ import annotations

import logging
import sys
import types
from argparse import Namespace

import pytest
import torch

from mindspeed_core.errors import ArgumentError, SessionError
from mindspeed_core.platforms import process_memory
from mindspeed_core.platforms.cpu import CpuPlatform
from mindspeed_core.runtime.patches import PatchLedger
from mindspeed_megatron.global_state import destroy_megatron_state


def start(**args):
    ledger = PatchLedger()
    platform = CpuPlatform()
    try:
        ledger.apply(platform.patches(), owner=platform.name)
        platform.open(types.SimpleNamespace(args=types.SimpleNamespace(**args), ledger=ledger))
    except BaseException:
        ledger.revert()
        raise
    return ledger


@pytest.fixture(scope="module")
def ledger():
    ledger = start()
    yield ledger
    ledger.revert()


pytestmark = pytest.mark.usefixtures("ledger")


def test_cuda_is_not_available_but_its_current_device_is_an_index():
    assert torch.cuda.is_available() is False
    assert type(torch.cuda.current_device()) is int
    assert (torch.cuda.current_device(), torch.cuda.device_count()) == (0, 1)


@pytest.mark.parametrize("device", ["cuda", "cuda:3", 0, torch.device("cuda", 1), None, "cpu"])
@pytest.mark.parametrize(
    "make",
    [
        lambda **k: torch.empty(2, **k),
        lambda **k: torch.zeros([], **k),
        lambda **k: torch.full((2,), 1.5, **k),
        lambda **k: torch.tensor([1, 2], **k),
        lambda **k: torch.as_tensor([1, 2], **k),
        lambda **k: torch.arange(4, **k),
        lambda **k: torch.randn(2, **k),
        lambda **k: torch.randperm(4, **k),
        lambda **k: torch.ones_like(torch.zeros(1), **k),
        lambda **k: torch.zeros(1).new_empty((2,), **k),
        lambda **k: torch.zeros(1).new_tensor([1.0], **k),
        lambda **k: torch.zeros(1).to(**k),
    ],
)
def test_factories_send_cuda_to_the_cpu(make, device):
    assert make(device=device).device.type == "cpu"


def test_meta_tensors_stay_meta():
    assert torch.empty(2, device="meta").device.type == "meta"
    assert torch.zeros(1).to("meta").device.type == "meta"


def test_pinned_factories_and_tensors_need_no_device():
    assert torch.empty(2, pin_memory=True).shape == (2,)
    tensor = torch.zeros(1)
    assert tensor.pin_memory() is tensor


@pytest.mark.parametrize(
    "arguments", [("cuda",), (0,), (torch.device("cuda"), torch.float64), (torch.float64,)]
)
def test_tensor_to_accepts_cuda_in_every_position(arguments):
    moved = torch.zeros(1).to(*arguments)
    assert moved.device.type == "cpu"
    assert moved.dtype is (torch.float64 if torch.float64 in arguments else torch.float32)


def test_cuda_methods_return_the_same_object():
    tensor, module = torch.zeros(1), torch.nn.Linear(1, 1)
    assert tensor.cuda() is tensor
    assert tensor.cuda(torch.cuda.current_device(), non_blocking=True) is tensor
    assert module.cuda(0) is module
    assert tensor.is_cuda is False
    tensor.record_stream(torch.cuda.current_stream())


def test_modules_move_to_cuda_by_staying():
    assert torch.nn.Linear(1, 1).to("cuda").weight.device.type == "cpu"


def test_default_device_context_means_the_cpu():
    with torch.device("cuda"):
        assert torch.zeros(1).device.type == "cpu"
    with torch.device("meta"):
        assert torch.zeros(1).device.type == "meta"


def test_load_maps_cuda_to_the_cpu(tmp_path):
    torch.save(torch.arange(3), tmp_path / "tensor.pt")
    assert torch.load(tmp_path / "tensor.pt", map_location="cuda:0").tolist() == [0, 1, 2]


def test_type_names_cuda_only_to_megatron():
    tensor = torch.zeros(1, dtype=torch.bfloat16)
    ask = compile("answer = tensor.type()", "asker", "exec")
    megatron = {"__name__": "megatron.core.optimizer.optimizer", "tensor": tensor}
    exec(ask, megatron)
    assert megatron["answer"] == "torch.cuda.BFloat16Tensor"
    assert tensor.type() == "torch.BFloat16Tensor"
    assert tensor.type("torch.cuda.FloatTensor").dtype is torch.float32
    assert tensor.type(torch.float64).dtype is torch.float64


def test_device_generator_is_the_one_dropout_draws_from():
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    first = torch.nn.functional.dropout(torch.ones(64))
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.nn.functional.dropout(torch.ones(64)), first)
    assert torch.cuda.default_generators[0] is torch.default_generator
    assert torch.cuda.initial_seed() == 7


def test_lazy_calls_happen_now():
    called = []
    torch.cuda._lazy_call(lambda: called.append(1))
    torch.cuda._lazy_init()
    assert called == [1]


def test_streams_and_events_work_as_megatron_uses_them():
    side = torch.cuda.Stream(device="cuda", priority=-1)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        event = side.record_event()
    with torch.cuda.stream(None):
        torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    end.record(torch.cuda.default_stream())
    assert start.elapsed_time(end) >= 0
    assert event.query()
    assert isinstance(torch.cuda.Stream, type)
    with torch.cuda.device(0):
        torch.cuda.set_device(0)
    assert torch.cuda.is_current_stream_capturing() is False


def test_nvtx_range_is_a_context_manager_and_a_decorator():
    torch.cuda.nvtx.range_push("a")
    torch.cuda.nvtx.range_pop()
    with torch.cuda.nvtx.range("b"):
        pass
    assert torch.cuda.nvtx.range("c")(lambda: 3)() == 3


def test_memory_figures_are_those_of_this_process():
    resident = torch.cuda.memory_allocated()
    assert 10 << 20 < resident <= torch.cuda.max_memory_allocated() < process_memory.physical_bytes()
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] >= resident
    assert torch.cuda.memory_stats()["num_ooms"] == 0
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total
    torch.cuda.empty_cache()


def test_platform_labels_its_memory_figures():
    platform = CpuPlatform()
    assert platform.memory_allocated().source == platform.peak_memory().source == "process RSS"
    assert platform.total_memory() == process_memory.physical_bytes()


def test_peak_follows_an_allocation_and_its_reset():
    if not process_memory.reset_peak():
        assert process_memory.peak_resident_bytes() >= process_memory.resident_bytes()
        return
    before = process_memory.peak_resident_bytes()
    block = bytearray(b"x") * (64 << 20)
    assert process_memory.peak_resident_bytes() - before > 48 << 20
    del block
    process_memory.reset_peak()
    assert process_memory.peak_resident_bytes() - before < 48 << 20


def test_autocast_for_cuda_applies_on_the_cpu():
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") is torch.bfloat16
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype is torch.bfloat16
    assert not torch.is_autocast_enabled("cuda")


def test_compiled_functions_run_eagerly():
    ran = []

    @torch.compile
    def function(x):
        ran.append(1)
        return x + 1

    function(torch.zeros(1))
    function(torch.zeros(1))
    assert len(ran) == 2


def test_split_sizes_become_numbers():
    from megatron.core.transformer.moe.moe_utils import maybe_move_tensor_to_cpu

    sizes = maybe_move_tensor_to_cpu(torch.tensor([3, 5]), as_numpy=True)
    assert type(sizes).__name__ == "ndarray"
    tensor = torch.tensor([3, 5])
    assert maybe_move_tensor_to_cpu(tensor) is tensor


def test_name_that_needs_transformer_engine_exists_as_none():
    from megatron.core.transformer.moe import moe_utils

    assert moe_utils.te_general_gemm is None


def test_shared_generator_is_not_worth_a_warning(caplog):
    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    # Programs that ran in this process before may have quietened megatron-core.
    with caplog.at_level(logging.WARNING, logger=logger.name):
        logger.warning("CPU RNG state changed within GPU RNG context")
        logger.warning("something else")
    assert [record.message for record in caplog.records] == ["something else"]


def test_every_change_is_listed_with_owner_and_reason(ledger):
    listing = ledger.listing()
    assert {entry.owner for entry in listing} == {"cpu"}
    assert all(entry.reason for entry in listing)
    assert {"torch.cuda:current_device", "torch:Tensor.to", "torch.compiler:set_stance"} <= {
        entry.target for entry in listing
    }


def test_gpt_trains_forward_and_backward():
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(11)
        config = TransformerConfig(
            num_layers=2,
            hidden_size=16,
            num_attention_heads=2,
            hidden_dropout=0.1,
            attention_dropout=0.1,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
        )
        model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=32, max_sequence_length=8).cuda()
        tokens = torch.randint(0, 32, (2, 8), device="cuda")
        positions = torch.arange(8, device=torch.cuda.current_device()).expand(2, 8)
        mask = torch.ones(1, 1, 8, 8, dtype=torch.bool, device="cuda").triu(1)
        loss = model(tokens, positions, mask, labels=tokens).mean()
        loss.backward()
        assert 2.0 < loss.item() < 6.0
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    finally:
        destroy_megatron_state()
        torch.distributed.destroy_process_group()


def test_megatron_globals_are_forgotten():
    from megatron.core import num_microbatches_calculator, parallel_state
    from megatron.core.tensor_parallel import random

    random.initialize_rng_tracker()
    num_microbatches_calculator.init_num_microbatches_calculator(0, None, 4, 2, 1)
    parallel_state._set_global_memory_buffer()
    destroy_megatron_state()
    assert random._CUDA_RNG_STATE_TRACKER is None
    assert random._CUDA_RNG_STATE_TRACKER_INITIALIZED is False
    assert num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is None
    assert parallel_state._GLOBAL_MEMORY_BUFFER is None
    assert not parallel_state.model_parallel_is_initialized()


def test_process_that_uses_torch_npu_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    with pytest.raises(SessionError, match="would redirect its tensors; choose --platform npu"):
        CpuPlatform().patches()


def test_process_that_uses_cuda_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(SessionError, match="redirect CUDA tensors; choose --platform cuda"):
        CpuPlatform().patches()


@pytest.mark.parametrize(
    ("name", "value"),
    [("ddp_average_in_collective", True), ("cuda_graph_impl", "local"), ("enable_cuda_graph", True)],
)
def test_flags_that_a_cpu_cannot_honour_are_refused(name, value):
    with pytest.raises(ArgumentError, match="--" + name.replace("_", "-")):
        CpuPlatform().check_arguments(Namespace(**{name: value}))
