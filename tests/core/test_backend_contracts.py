"""Contracts of communication backends: what a call may be, and in which order calls are served."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_core.backend_contracts import BackendRefusal, CollectiveCall, TensorFacts
from mindspeed_core.backend_contracts.hccl import HCCL
from mindspeed_core.backend_contracts.nccl import NCCL
from mindspeed_core.backend_contracts.rendezvous import stuck_ranks
from mindspeed_core.instruments.call_order import OrderedCall, waiting_for_ever
from mindspeed_core.instruments.communication import count_communication
from mindspeed_core.testing import run_world


def reduction(dtype, op="SUM", operation="all_reduce", **facts):
    return CollectiveCall(operation, "tp", 2, (TensorFacts("tensor", dtype, (4,), **facts),), op)


@pytest.mark.parametrize(
    ("contract", "call", "words"),
    [
        (HCCL["910B"], reduction("float64"), "SUM reduces bfloat16"),
        (HCCL["910_93"], reduction("float64", "MAX"), "convert before the call"),
        (HCCL["910B"], reduction("bool", operation="reduce_scatter_tensor"), "convert"),
        (HCCL["910B"], reduction("bfloat16", "PRODUCT"), "PRODUCT reduces"),
        (HCCL["910B"], reduction("int32", "AVG"), "sum and divide yourself"),
        (HCCL["910B"], reduction("int32", "BOR"), "no reduction BOR"),
        (HCCL["910B"], reduction("complex64"), "complex64 does not travel"),
        (HCCL["910B"], reduction("float32", contiguous=False), "not contiguous"),
        (NCCL, reduction("int16"), "int16 does not travel"),
        (NCCL, reduction("int32", "BXOR"), "no reduction BXOR"),
        (NCCL, reduction("float32", contiguous=False), "not contiguous"),
    ],
)
def test_a_call_that_a_backend_refuses_is_refused_with_the_rule(contract, call, words):
    with pytest.raises(BackendRefusal, match=words) as refused:
        contract.check(call, "model.py:7 (forward)")

    assert contract.name in str(refused.value)
    assert "model.py:7 (forward)" in str(refused.value)


@pytest.mark.parametrize(
    ("contract", "call"),
    [
        (HCCL["910B"], reduction("bool", "MAX")),
        (HCCL["910B"], reduction("int64")),
        (HCCL["910B"], reduction("float32", "AVG")),
        (HCCL["950"], reduction("float64")),
        (HCCL["950"], reduction("int32", "AVG")),
        (NCCL, reduction("float64", "MAX")),
        (NCCL, reduction("int64", "AVG")),
    ],
)
def test_a_call_that_a_backend_takes_passes(contract, call):
    assert contract.broken_rule(call) is None


@pytest.mark.parametrize("contract", [HCCL["910B"], NCCL])
def test_rows_that_ranks_do_not_divide_need_split_sizes(contract):
    rows = TensorFacts("input", "float32", (5, 2))
    call = CollectiveCall("all_to_all_single", "ep", 2, (rows,))

    assert "give split sizes" in contract.broken_rule(call)[0]
    assert contract.broken_rule(CollectiveCall("all_to_all_single", "ep", 2, (rows,), "", ((5, 0),))) is None


def message(operation, peer, at, wait=None, batch=None, ranks=(0, 1)):
    return OrderedCall("ring", ranks, operation, 4, "float32", peer, at, wait, batch)


def ring(size, batched):
    """Return the calls of one step of a ring in which every rank sends first."""
    ranks = tuple(range(size))
    batch = 1 if batched else None
    return {
        rank: [
            message("isend", (rank + 1) % size, 1, 3, batch, ranks),
            message("irecv", (rank - 1) % size, 2, 4, batch, ranks),
        ]
        for rank in ranks
    }


def test_a_ring_of_two_that_sends_first_waits_for_ever():
    assert {one.rank for one in stuck_ranks(ring(2, batched=False))} == {0, 1}
    assert "rank 0 waits for ever for call 0 (ring: isend" in waiting_for_ever(ring(2, batched=False))[0]


@pytest.mark.parametrize("size", [3, 4, 8])
def test_a_longer_ring_has_a_stream_for_each_neighbour(size):
    assert stuck_ranks(ring(size, batched=False)) == ()


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_batch_begins_all_its_messages(size):
    assert stuck_ranks(ring(size, batched=True)) == ()


def test_a_batch_does_not_meet_a_single_message():
    calls = {0: [message("isend", 1, 1, 2, batch=1)], 1: [message("irecv", 0, 1, 2)]}

    assert len(stuck_ranks(calls)) == 2


def test_ranks_that_turn_round_two_groups_wait_for_ever():
    def collective(group, at):
        return OrderedCall(group, (0, 1), "all_reduce", 4, "float32", None, at, at + 1)

    calls = {0: [collective("a", 1), collective("b", 3)], 1: [collective("b", 1), collective("a", 3)]}

    assert {one.rank for one in stuck_ranks(calls)} == {0, 1}


def test_a_rank_that_is_not_known_meets_every_call():
    assert stuck_ranks({1: ring(3, batched=False)[1]}) == ()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_calls_of_one_order_never_wait_for_ever(data):
    """Ranks that follow one global order of calls come to its end, however late they wait."""
    size = data.draw(st.integers(2, 4))
    events = dict.fromkeys(range(size), 0)
    calls = {rank: [] for rank in range(size)}

    def launch(rank, operation, peer, group):
        events[rank] += 1
        at = events[rank]
        waits = data.draw(st.sampled_from(["now", "never"]))
        events[rank] += waits == "now"
        wait = events[rank] if waits == "now" else None
        calls[rank].append(OrderedCall(group, tuple(range(size)), operation, 4, "f", peer, at, wait))

    for _ in range(data.draw(st.integers(1, 12))):
        group = data.draw(st.sampled_from(["a", "b"]))
        if data.draw(st.booleans()):
            for rank in range(size):
                launch(rank, "all_reduce", None, group)
        else:
            a, b = data.draw(st.permutations(range(size)))[:2]
            launch(a, "isend", b, group)
            launch(b, "irecv", a, group)

    assert stuck_ranks(calls) == ()


def refused_in_a_world():
    """Return what a rank is told of a call that gloo takes, and of one in a group of gloo."""
    told = []
    dist.init_process_group("gloo")
    with count_communication(contracts=(HCCL["910B"],)):
        for tensor in (torch.ones(3, dtype=torch.float64), torch.ones(4, 4).t()):
            try:
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
            except BackendRefusal as refusal:
                told.append(str(refusal))
        group = dist.new_group([0, 1], backend="gloo", group_desc="DATA_PARALLEL_GROUP_GLOO")
        dist.all_reduce(torch.ones(3, dtype=torch.float64), group=group)
    dist.destroy_process_group()
    return told


def test_a_call_is_refused_before_it_is_made_with_its_line():
    wide, strided = run_world(f"{__name__}:refused_in_a_world", 2)[0]

    assert "all_reduce of float64[3] with MAX" in wide
    assert "test_backend_contracts.py" in wide
    assert "not contiguous" in strided
