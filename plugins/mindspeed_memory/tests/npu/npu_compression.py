"""Saved tensors in the device's own compressed form: every bit comes back, and calls keep their contract."""

from __future__ import annotations

import pytest
import torch

from mindspeed_megatron.devices.npu import NpuPlatform
from mindspeed_memory.saved.compressors import compressor
from mindspeed_memory.saved.device_compression import LEAST, DeviceCompressor, addressed_memory
from mindspeed_memory.saved.engine import SavedTensors
from mindspeed_testing.npu import value_device
from mindspeed_testing.npu.kernels.contract import KernelRefusal

SIZES = (LEAST, LEAST + 64, 3 * LEAST + 640)


def patterns(count):
    bits = torch.arange(count) * 40503 % 2**16
    return (bits - 2**15).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("count", SIZES)
def test_every_bit_comes_back(count, on_host):
    with value_device():
        compress = compressor(NpuPlatform(), smallest=1, on_host=on_host, limit_gib=None)
        assert isinstance(compress, DeviceCompressor)
        numbers = patterns(count)
        kept = compress(numbers.to("npu"))
        kept.release()
        assert kept.flat().cpu().view(torch.int16).equal(numbers.view(torch.int16))
        share = compress.after / compress.before
        assert share < (0.25 if on_host else 0.75)


def test_buffers_of_the_host_are_made_once():
    with value_device():
        compress = compressor(NpuPlatform(), smallest=1, on_host=True, limit_gib=None)
        for _ in range(3):
            kept = compress(patterns(LEAST).to("npu"))
            del kept
        assert compress._pool.made == 2
        assert compress._pool.used == 0


def test_gradients_are_those_of_what_was_kept():
    with value_device():
        compress = compressor(NpuPlatform(), smallest=1, on_host=False, limit_gib=None)
        engine = SavedTensors(compress, min_bytes=1, depth=0)
        x = torch.linspace(-1, 1, LEAST).to("npu", torch.bfloat16).requires_grad_()
        y = x.detach().clone().requires_grad_()
        ((y * 2) * (y * 2)).sum().backward()
        engine.begin()
        loss = engine.scope(lambda value: ((value * 2) * (value * 2)).sum())(x)
        engine.end(loss)
        loss.backward()
        assert compress.before > 0
        assert x.grad.cpu().equal(y.grad.cpu())


@pytest.mark.parametrize(("count", "dtype"), [(LEAST - 64, torch.bfloat16), (LEAST, torch.float32)])
def test_what_the_operators_do_not_take_stays_as_it_is(count, dtype):
    with value_device():
        compress = compressor(NpuPlatform(), smallest=1, on_host=False, limit_gib=None)
        assert compress(torch.zeros(count, dtype=dtype, device="npu")) is None


def test_codes_without_room_for_the_worst_case_are_refused():
    import torch_npu

    with value_device():
        numbers = torch.zeros(LEAST, dtype=torch.bfloat16, device="npu")
        parts = [
            torch.zeros(size, dtype=torch.bfloat16, device="npu") for size in (LEAST // 2, 256, LEAST // 4)
        ]
        counts = torch.zeros((1, 256), dtype=torch.int32, device="npu")
        with pytest.raises(KernelRefusal, match="8448 a core"):
            torch_npu.npu_hans_encode(numbers, True, False, out=(counts, *parts))


def test_memory_of_the_host_that_the_device_addresses_is_bytes():
    with value_device():
        memory = addressed_memory(12, torch.device("npu"))
        assert (memory.dtype, memory.shape) == (torch.uint8, (12,))
