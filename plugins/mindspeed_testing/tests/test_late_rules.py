"""Rules of the lagging device one by one: what is read before a wait, and what is said about it."""

from types import SimpleNamespace

import pytest
import torch

from mindspeed_testing.lagging.communication import Communication
from mindspeed_testing.lagging.device import LaggingDevice

N = 8


@pytest.fixture
def device():
    device = LaggingDevice()
    device.communication = Communication(device)
    device.start()
    yield device
    device.stop()


def only_finding(device, rule):
    """Return the one thing that was found, whose stacks both begin in this file."""
    (finding,) = device.findings.reported
    device.findings.reported.clear()
    assert finding.rule == rule, str(finding)
    for frames in (finding.here, finding.before):
        assert frames[0][0].co_filename == __file__, str(finding)
    return finding


def all_nan(tensor):
    return bool(tensor.isnan().all())


def doubled_beside(device, x, stream):
    """Double a tensor on a stream that has waited for it."""
    stream.wait_stream(device.main)
    with device.on(stream):
        return x * 2


def test_a_result_is_there_for_who_waited_and_for_nobody_else(device):
    side, other, x = device.stream("side"), device.stream("other"), torch.ones(N)
    result = doubled_beside(device, x, side)
    other.wait_stream(side)
    assert all_nan(result.clone())
    finding = only_finding(device, "read without a wait")
    assert "other waited for it, the default stream did not" in finding.text


def test_a_wait_orders_the_stream_that_waits(device):
    side = device.stream("side")
    result = doubled_beside(device, torch.ones(N), side)
    event = side.record_event()
    event.wait(device.main)
    assert result.clone().tolist() == [2.0] * N
    assert device.findings.reported == []


@pytest.mark.parametrize("make", [torch.zeros_like, torch.empty_like, lambda tensor: tensor.new_zeros(())])
def test_a_tensor_made_like_another_needs_none_of_its_values(device, make):
    x = torch.ones(N)
    make(doubled_beside(device, x, device.stream("side")))
    assert device.findings.reported == []


def test_waits_of_the_host_are_counted_and_questions_are_not(device):
    x = torch.ones(N)
    event = device.main.record_event()
    while not event.query():
        pass
    event.synchronize()
    assert not device.host.waits
    x.sum().item()
    device.main.record_event().synchronize()
    ((line, count),) = device.host.waits.items()
    assert count == 1
    assert "test_late_rules.py" in line
    x.add_(1)
    device.synchronize()
    assert device.host.waits.total() == 2


def test_memory_that_is_given_away_under_a_read_leaves_nan(device):
    side = device.stream("side")
    x = torch.ones(N)
    result = doubled_beside(device, x, side)
    del x
    torch.zeros(N)
    device.main.wait_stream(side)
    assert all_nan(result)
    only_finding(device, "freed while in use")


def test_memory_that_the_allocator_was_told_of_stays(device):
    side = device.stream("side")
    x = torch.ones(N)
    result = doubled_beside(device, x, side)
    device.record_stream(x, side)
    del x
    torch.zeros(N)
    device.main.wait_stream(side)
    assert result.tolist() == [2.0] * N
    assert device.findings.reported == []


def test_memory_goes_back_to_the_stream_that_it_was_taken_on(device):
    side = device.stream("side")
    result = doubled_beside(device, torch.ones(N), side)
    device.main.wait_stream(side)
    result.sum()
    del result
    # The default stream has it again at once, which is no fault of its own: the memory is the side's.
    torch.zeros(N)
    assert device.findings.reported == []
    with device.on(side):
        torch.zeros(N)
    only_finding(device, "freed while in use")


def test_a_storage_that_is_emptied_under_a_copy_is_named(device):
    side = device.stream("side")
    x = torch.ones(N)
    result = doubled_beside(device, x, side)
    x.untyped_storage().resize_(0)
    torch.zeros(N)
    device.main.wait_stream(side)
    assert all_nan(result)
    only_finding(device, "emptied while in use")


def test_a_pinned_buffer_is_filled_when_the_host_has_waited(device):
    x, buffer = torch.ones(N), device.pin(torch.zeros(N))
    buffer.copy_(x, non_blocking=True)
    copied = device.main.record_event()
    assert all_nan(buffer.clone())
    only_finding(device, "read without a wait")
    copied.synchronize()
    assert buffer.tolist() == [1.0] * N


def test_an_event_that_nobody_recorded_is_named_with_the_place_where_it_was_made(device):
    device.event().wait(device.main)
    assert "the default stream waits for an event" in only_finding(device, "event never recorded").text


class Backend:
    """A process group whose calls are done at once; gathers give two times what a rank gave."""

    group_desc = "PAIR"

    def rank(self):
        return 0

    def size(self):
        return 2

    @staticmethod
    def gather(group, output, given):
        output.copy_(given.repeat(2))
        return SimpleNamespace(wait=lambda *_: True, is_completed=lambda: True)


def gathered(device, given):
    """Begin to gather; return the output and the work."""
    output, group = torch.zeros(2 * N), Backend()
    work = device.communication.run(Backend.gather, "_allgather_base", group, (output, given), {})
    return output, work


def test_a_collective_s_output_is_there_for_the_stream_that_waited(device):
    output, work = gathered(device, torch.ones(N))
    side = device.stream("side")
    with device.on(side):
        work.wait()
    assert all_nan(output.clone())
    assert "side waited for it" in only_finding(device, "read without a wait").text
    work.wait()
    assert output.tolist() == [1.0] * (2 * N)


def test_an_input_that_changes_past_torch_s_operators_is_seen_by_its_digest(device):
    given = torch.ones(N)
    view = given.numpy()
    output, work = gathered(device, given)
    view[0] = 5.0
    work.wait()
    only_finding(device, "changed before the wait")
    assert output.tolist() == [1.0] * (2 * N)


def test_work_that_nobody_waited_for_is_named(device):
    gathered(device, torch.ones(N))
    (finding,) = device.findings.reported
    assert finding.rule == "dropped without a wait"
    assert finding.here[0][0].co_filename == __file__
