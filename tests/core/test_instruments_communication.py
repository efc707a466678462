import sys

import pytest
import torch
import torch.distributed as dist

from mindspeed_megatron.instruments.communication import Call, CommunicationLog, Progress, count_communication
from mindspeed_testing import run_world


def communicate():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group(list(range(size)), group_desc="everybody")
    x = torch.ones(8)
    mappings = sys.modules["megatron.core.tensor_parallel.mappings"]
    before = mappings.dist_all_gather_func
    with count_communication() as log:
        dist.all_reduce(x)
        dist.all_reduce(tensor=x, group=pair, async_op=True).wait()
        mappings.dist_all_gather_func(torch.empty(8 * size), x, group=pair)
        dist.reduce_scatter_tensor(torch.empty(8 // size), x)
        splits = [1] * (size - 1) + [9 - size]
        received = [splits[rank]] * size
        dist.all_to_all_single(torch.empty(sum(received)), x, received, splits)
        dist.barrier()
        if rank == 0:
            dist.send(x, 1)
        elif rank == 1:
            dist.recv(x, 0)
        operations = []
        if rank < 2:
            operations = [
                dist.P2POp(dist.isend, x, 1 - rank),
                dist.P2POp(dist.irecv, torch.empty(8), 1 - rank),
            ]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        with log.paused():
            dist.all_reduce(x)
        with pytest.raises((ValueError, RuntimeError)):
            dist.reduce_scatter_tensor(torch.empty(3), torch.empty(size * 5))
        dist.barrier()
    assert mappings.dist_all_gather_func is before
    dist.all_reduce(x)
    return rank, log


@pytest.mark.parametrize("size", [2, 4])
def test_calls_and_bytes_follow_closed_formulas(size):
    for rank, log in run_world(communicate, size):
        assert log.count("all_reduce") == 2
        assert log.count("all_reduce", "everybody") == 1
        assert [call.asynchronous for call in log.select("all_reduce")] == [False, True]
        assert log.sent_bytes("all_reduce") == pytest.approx(2 * 2 * (size - 1) / size * 32)
        assert log.input_bytes("all_gather_into_tensor") == 32
        assert log.sent_bytes("all_gather_into_tensor", "everybody") == (size - 1) * 32
        scatter = log.select("reduce_scatter_tensor")[0]
        assert (scatter.input_bytes, scatter.sent_bytes) == (32, pytest.approx((size - 1) / size * 32))
        own = 4 * (9 - size if rank == size - 1 else 1)
        assert log.sent_bytes("all_to_all_single") == 32 - own
        assert log.count("send") == (rank == 0)
        assert log.count("isend") == log.count("irecv") == (rank < 2)
        assert log.sent_bytes("isend") == (32 if rank < 2 else 0)
        assert log.input_bytes("irecv") == log.input_bytes("recv") == 0
        assert log.count("barrier") == 2


def test_the_table_adds_up_by_operation_and_group():
    _, log = run_world(communicate, 2)[0]
    total = log.table()["all_reduce", "everybody"]
    assert (total.calls, total.input_bytes, total.sent_bytes) == (1, 32, 32.0)


def objects():
    dist.init_process_group("gloo")
    with count_communication() as log:
        dist.all_gather_object([None, None], "x")
    return log


def test_calls_inside_other_calls_are_not_counted_twice():
    log = run_world(objects, 2)[0]
    # torch sends sizes, then contents.
    assert {call.operation for call in log.calls} == {"all_gather"}
    assert log.count() == 2


def overlapping():
    dist.init_process_group("gloo")
    x, weight = torch.ones(4, 4), torch.ones(4, 4)
    wait = dist.Work.wait
    with count_communication(computation=True) as log:
        early = dist.all_reduce(x, async_op=True)
        early.wait()
        weight @ weight
        late = dist.all_reduce(x, async_op=True)
        weight @ weight.view(4, 4)
        weight + 1
        late.wait()
        late.wait()
        dist.all_reduce(x)
        forgotten = dist.all_reduce(x, async_op=True)
        with dist._coalescing_manager(async_ops=True) as manager:
            dist.all_reduce(x)
            dist.all_reduce(weight)
        weight @ weight
        manager.wait()
        with dist._coalescing_manager():
            dist.all_reduce(x)
    assert dist.Work.wait is wait
    forgotten.wait()
    return log.calls


@pytest.fixture(scope="module")
def overlapped():
    return run_world(overlapping, 2)[0]


def test_what_was_computed_between_launch_and_wait_is_recorded(overlapped):
    early, late = overlapped[0].meanwhile, overlapped[1].meanwhile
    assert (early.operators, early.flops) == (0, 0)
    # A view computes nothing; the first wait counts; 2 * 4 * 4 * 4 operations of one product.
    assert (late.operators, late.flops) == (2, 128)
    assert late.seconds > 0


def test_a_synchronous_call_and_one_without_wait_overlap_nothing(overlapped):
    assert (overlapped[2].asynchronous, overlapped[2].meanwhile.flops) == (False, 0)
    assert (overlapped[3].asynchronous, overlapped[3].waited) == (True, None)


def test_calls_of_a_coalesced_batch_are_waited_for_together(overlapped):
    batch, alone = overlapped[4:6], overlapped[6]
    assert [(call.asynchronous, call.meanwhile.flops) for call in batch] == [(True, 128)] * 2
    assert (alone.asynchronous, alone.meanwhile.flops) == (False, 0)


def test_what_a_backend_takes_for_itself_follows_from_the_whole_tensor():
    def call(operation, size):
        return Call(operation, "dp", (0, 1, 2, 3), size, 0.0, False, Progress(0.0))

    gathered = call("all_gather_into_tensor", 100)
    log = CommunicationLog([call("all_reduce", 1000), call("reduce_scatter_tensor", 300), gathered])

    assert log.largest_temporary({"reduce_scatter_tensor": 1.0, "all_gather_into_tensor": 1.0}) == (
        400.0,
        gathered,
    )
    assert log.largest_temporary({}) == (0.0, None)
