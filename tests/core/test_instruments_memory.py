import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_megatron.instruments.memory import TensorBytes, tensor_bytes
from mindspeed_megatron.instruments.work_counter import WorkCounter


def test_peak_of_a_chain_is_two_neighbours():
    # y = x + 1, thrice, keeping only the last: two tensors of 4 kB at any time.
    x = torch.zeros(1000)
    with TensorBytes() as tracked:
        for _ in range(3):
            x = x + 1
    assert (tracked.alive, tracked.peak) == (4000, 8000)


def test_views_and_changes_in_place_allocate_nothing():
    x = torch.zeros(10, 10)
    with TensorBytes() as tracked:
        y = x.t()[2:]
        y.mul_(2)
        x.view(-1)
    assert tracked.peak == 0


def test_saved_activations_live_until_backward_has_used_them():
    weight = torch.ones(100, 100, requires_grad=True)
    x = torch.ones(50, 100)
    with TensorBytes() as tracked:
        hidden = (x @ weight).sigmoid()
        # The product is not saved, the sigmoid is: 50*100*4 bytes.
        loss = hidden.sum()
        del hidden
        assert tracked.alive == 50 * 100 * 4 + 4
        loss.backward()
        del loss
        assert tracked.alive == 100 * 100 * 4
    assert weight.grad is not None


def test_resizing_a_storage_counts_for_new_and_existing_ones():
    old = torch.zeros(100)
    with TensorBytes() as tracked:
        new = torch.zeros(25)
        assert tracked.alive == 100
        new.untyped_storage().resize_(0)
        assert tracked.alive == 0
        old.untyped_storage().resize_(0)
        assert tracked.alive == -400
    assert "resize_" not in vars(torch.UntypedStorage)


def test_paused_measurements_do_not_count_then_or_later():
    with TensorBytes() as tracked:
        with tracked.paused():
            mine = torch.zeros(1000)
        kept = mine + 1
        del mine
        assert tracked.alive == 4000
        del kept
    assert tracked.alive == 0


def test_peak_starts_anew_at_what_is_alive():
    with TensorBytes() as tracked:
        kept = torch.zeros(10)
        torch.zeros(1000)
        tracked.reset_peak()
        assert tracked.peak == 40
    del kept


def test_shared_storage_counts_once():
    buffer = torch.zeros(100)
    assert tensor_bytes([buffer, buffer[:10], buffer.view(10, 10), torch.zeros(5)]) == 420


def test_storages_in_the_place_of_freed_ones_count_anew():
    with TensorBytes() as tracked:
        for _ in range(100):
            torch.zeros(10)
        assert (tracked.alive, tracked.peak) == (0, 40)
        kept = torch.zeros(25)
    assert (tracked.alive, tracked.peak) == (100, 100)
    del kept


def test_measurements_within_one_another_count_each_for_itself():
    with TensorBytes() as outer:
        first = torch.zeros(10)
        with TensorBytes() as inner:
            second = torch.zeros(25)
            first.untyped_storage().resize_(0)
        assert (inner.alive, inner.peak) == (60, 100)
        third = torch.zeros(5)
    assert (outer.alive, outer.peak) == (120, 140)
    assert inner.alive == 60
    del second, third


def test_the_peak_is_the_profiler_s_up_to_the_temporaries_of_one_operator():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64), torch.nn.GELU()) * 4)
    x = torch.randn(32, 64)
    model(x).sum().backward()
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
        TensorBytes() as tracked,
    ):
        model(x).sum().backward()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    assert tracked.peak <= peak <= tracked.peak + 64 * 64 * 4


class Below(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("instrument", [TensorBytes, WorkCounter])
def test_the_device_of_a_tensor_without_values_is_answered_at_once(instrument):
    with FakeTensorMode():
        tensor = torch.empty(2, device="meta"), torch.empty(2, device="cpu")
    with Below() as below, instrument():
        assert [one.device.type for one in tensor] == ["meta", "cpu"]
    assert below.seen == []
