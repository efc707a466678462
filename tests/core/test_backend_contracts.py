"""Contracts of communication backends: what a call may be, and in which order calls are served."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from mindspeed_megatron.backend_contracts import BackendRefusal, CollectiveCall, TensorFacts
from mindspeed_megatron.backend_contracts.hccl import HCCL, contract_for
from mindspeed_megatron.backend_contracts.nccl import NCCL
from mindspeed_megatron.backend_contracts.rendezvous import stuck_ranks
from mindspeed_megatron.instruments.call_order import OrderedCall, disagreements, waiting_for_ever
from mindspeed_megatron.instruments.communication import count_communication
from mindspeed_testing import run_world


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
        (HCCL["910B"], reduction("float32", behind=2), "begins 2 bytes behind a multiple"),
        (NCCL, reduction("bfloat16", behind=1, operation="reduce_scatter_tensor"), r"call \.clone"),
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
    assert (
        contract.broken_rule(
            CollectiveCall("all_to_all_single", "ep", 2, (rows,), "", {"input_split_sizes": (5, 0)})
        )
        is None
    )


def tensors(**named):
    """Return the facts of float32 tensors by argument; of a list where a list of shapes is given."""
    found = []
    for argument, shapes in named.items():
        for shape in shapes if isinstance(shapes, list) else [shapes]:
            found.append(TensorFacts(argument, "float32", shape))
    return tuple(found)


UNEVEN = {"input_split_sizes": (3, 1), "output_split_sizes": (0, 2)}


@pytest.mark.parametrize(
    ("operation", "given", "splits", "words"),
    [
        ("all_gather_into_tensor", {"output_tensor": (7,), "input_tensor": (4,)}, {}, "has 7 numbers"),
        ("reduce_scatter_tensor", {"output": (4,), "input": (9,)}, {}, "have 8"),
        ("all_gather", {"tensor_list": [(4,)], "tensor": (4,)}, {}, "1 tensors for 2 ranks"),
        ("scatter", {"tensor": (4,), "scatter_list": [(4,)] * 3}, {}, "3 tensors for 2 ranks"),
        ("gather", {"tensor": (4,), "gather_list": [(4,), (5,)]}, {}, "use all_gather"),
        ("all_to_all", {"output_tensor_list": [(1,)] * 2, "input_tensor_list": [(1,)]}, {}, "1 tensors"),
        ("all_to_all_single", {"output": (2, 8), "input": (4, 8)}, {}, "give split sizes"),
        ("all_to_all_single", {"output": (2, 8), "input": (5, 8)}, UNEVEN, "add up to 4"),
        ("all_to_all_single", {"output": (2, 8), "input": (4, 6)}, UNEVEN, r"rows of input are \[6\]"),
        (
            "all_to_all_single",
            {"output": (3, 8), "input": (4, 8)},
            {"input_split_sizes": (3, 1)},
            "give output_split_sizes",
        ),
        (
            "all_to_all_single",
            {"output": (2, 8), "input": (4, 8)},
            {**UNEVEN, "input_split_sizes": (4,)},
            "1 sizes for 2 ranks",
        ),
        (
            "all_to_all_single",
            {"output": (2, 8), "input": (4, 8)},
            {**UNEVEN, "input_split_sizes": (5, -1)},
            "the size -1",
        ),
    ],
)
@pytest.mark.parametrize("contract", [HCCL["910B"], NCCL])
def test_tensors_that_do_not_fit_together_are_refused(contract, operation, given, splits, words):
    op = "SUM" if "reduce" in operation else ""
    with pytest.raises(BackendRefusal, match=words):
        contract.check(CollectiveCall(operation, "ep", 2, tensors(**given), op, splits))


@pytest.mark.parametrize("contract", [HCCL["910B"], NCCL])
def test_parts_without_rows_travel(contract):
    for shapes, splits in (
        ({"output": (2, 8), "input": (4, 8)}, UNEVEN),
        ({"output": (0, 8), "input": (0, 8)}, {"input_split_sizes": (0, 0), "output_split_sizes": (0, 0)}),
        ({"output": (0, 8), "input": (0, 8)}, {}),
    ):
        call = CollectiveCall("all_to_all_single", "ep", 2, tensors(**shapes), "", splits)
        assert contract.broken_rule(call) is None
    assert contract.broken_rule(reduction("float32")) is None


def test_one_dtype_travels_in_a_call():
    mixed = (TensorFacts("output_tensor", "float32", (4,)), TensorFacts("input_tensor", "bfloat16", (2,)))
    with pytest.raises(BackendRefusal, match="float32 and bfloat16"):
        NCCL.check(CollectiveCall("all_gather_into_tensor", "dp", 2, mixed))


def test_a_receive_names_its_sender():
    with pytest.raises(BackendRefusal, match="give src"):
        NCCL.check(CollectiveCall("recv", "pp", 2, tensors(tensor=(4,)), from_any=True))


def test_a_device_that_is_not_known_is_held_to_rules_that_are_named():
    assert contract_for("Ascend910_9391").name == "hccl 910_93"
    assumed = contract_for("Ascend1100X1")
    assert assumed.name == "hccl 910B (assumed for Ascend1100X1, which is not known)"
    assert assumed.reduced == HCCL["910B"].reduced


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


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_of_a_batch_meet_one_by_one(size):
    """As gradients of two buckets do that are reduced together, and what follows waits for them."""
    ranks = tuple(range(size))

    def reduction(at, wait=None, batch=None):
        return OrderedCall("data", ranks, "reduce_scatter_tensor", 4, "float32", None, at, wait, batch)

    whole = [reduction(1, batch=1), reduction(2, batch=1), reduction(3, wait=4)]
    assert stuck_ranks(dict.fromkeys(ranks, whole)) == ()
    # One rank forgets a bucket.
    part = [reduction(1, batch=1), reduction(3, wait=4)]
    assert stuck_ranks({**dict.fromkeys(ranks, whole), 0: part})


def test_ranks_that_turn_round_two_groups_wait_for_ever():
    def collective(group, at):
        return OrderedCall(group, (0, 1), "all_reduce", 4, "float32", None, at, at + 1)

    calls = {0: [collective("a", 1), collective("b", 3)], 1: [collective("b", 1), collective("a", 3)]}

    assert {one.rank for one in stuck_ranks(calls)} == {0, 1}


def first_use(group, at, ranks=(0, 1), operation="all_reduce", **options):
    """Return an asynchronous call that makes its communicator; nobody waits for it."""
    return OrderedCall(group, ranks, operation, 4, "float32", None, at, creates=True, **options)


def test_ranks_that_make_communicators_in_turned_order_wait_for_ever():
    """Nobody waits for the calls, so that only their communicators hold the ranks up."""
    turned = {0: [first_use("a", 1), first_use("b", 2)], 1: [first_use("b", 1), first_use("a", 2)]}
    used = {rank: [replace(call, creates=False) for call in calls] for rank, calls in turned.items()}

    assert {(one.rank, one.launching) for one in stuck_ranks(turned)} == {(0, True), (1, True)}
    assert stuck_ranks(used) == ()
    assert "makes it, and waits on the host" in waiting_for_ever(turned)[0]


def test_a_batch_that_makes_a_communicator_waits_for_all_ranks_of_the_group():
    ranks = (0, 1, 2)
    calls = {
        0: [replace(message("isend", 1, 1, 2, 1, ranks), creates=True)],
        1: [replace(message("irecv", 0, 1, 2, 1, ranks), creates=True)],
        2: [],
    }
    assert stuck_ranks(calls) == ()
    # The third rank does something with the first before it comes to the group.
    before = OrderedCall("other", (0, 2), "barrier", 0, "", None, 1, 2)
    calls[2] = [before, replace(message("irecv", 1, 3, 4, 1, ranks), creates=True)]
    calls[0] = [*calls[0], replace(before, launch_event=3, wait_event=4)]
    assert {one.rank for one in stuck_ranks(calls)} == {0, 1, 2}


def test_three_groups_in_a_circle_hold_their_devices():
    """Every two ranks agree, and nobody waits on the host: the devices are held by what each began first."""

    def launched(group, ranks, at):
        return OrderedCall(group, ranks, "all_reduce", 4, "float32", None, at, at + 4)

    a, b, c = ("a", (0, 1)), ("b", (1, 2)), ("c", (0, 2))
    calls = {0: (a, c), 1: (b, a), 2: (c, b)}
    circle = {
        rank: [launched(*group, at) for at, group in enumerate(groups)] for rank, groups in calls.items()
    }

    assert disagreements(list(circle.values())) == []
    assert stuck_ranks(circle) == ()
    assert {one.rank for one in stuck_ranks(circle, one_device=True)} == {0, 1, 2}
    assert "share a device" in waiting_for_ever(circle)[0]


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
    assert stuck_ranks(calls, one_device=True) == ()


def between_numbers(count):
    """Return float32 numbers of which the first begins in the middle of a number's place."""
    return torch.frombuffer(bytearray(4 * count + 2), dtype=torch.float32, count=count, offset=2)


def test_the_facts_of_a_tensor_say_where_it_begins():
    assert TensorFacts.of("tensor", between_numbers(3)) == TensorFacts("tensor", "float32", (3,), behind=2)
    # Gaps between numbers are whole numbers.
    assert TensorFacts.of("tensor", torch.ones(4, dtype=torch.bfloat16)[1:]).behind == 0
    with FakeTensorMode():
        assert TensorFacts.of("tensor", torch.ones(3)) == TensorFacts("tensor", "float32", (3,))


@pytest.mark.parametrize("contract", [HCCL["910B"], NCCL])
def test_what_only_moves_begins_anywhere(contract):
    moved = (TensorFacts("tensor", "float32", (4,), behind=2),)
    assert contract.broken_rule(CollectiveCall("broadcast", "tp", 2, moved)) is None


def refused_in_a_world():
    """Return what a rank is told of calls that gloo takes, and of one in a group of gloo."""
    told = []
    dist.init_process_group("gloo")
    with count_communication(contracts=(HCCL["910B"],)):
        for tensor in (torch.ones(3, dtype=torch.float64), torch.ones(4, 4).t(), between_numbers(3)):
            try:
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
            except BackendRefusal as refusal:
                told.append(str(refusal))
        group = dist.new_group([0, 1], backend="gloo", group_desc="DATA_PARALLEL_GROUP_GLOO")
        dist.all_reduce(torch.ones(3, dtype=torch.float64), group=group)
    told.append(created_by_calls())
    dist.destroy_process_group()
    return told


def created_by_calls():
    """Return which calls make communicators, and those that do so behind another collective."""
    rank = dist.get_rank()
    pair, late = (dist.new_group([0, 1], group_desc=name) for name in ("pair", "late"))
    with count_communication() as log:
        for _ in range(2):
            first = dist.all_reduce(torch.ones(1), group=pair, async_op=True)
            dist.all_reduce(torch.ones(1), group=late)
            first.wait()
        message = dist.isend if rank == 0 else dist.irecv
        for _ in range(2):
            message(torch.ones(1), 1 - rank, group=pair).wait()
        for _ in range(2):
            batch = [dist.P2POp(message, torch.ones(1), 1 - rank, group=late)]
            [work.wait() for work in dist.batch_isend_irecv(batch)]
    made = [(call.operation, call.group) for call in log.calls if call.creates]
    behind = [(call.group, other.group) for call, other in log.made_late()]
    return made, behind, log.communicators()


def test_a_call_is_refused_before_it_is_made_with_its_line():
    wide, strided, misplaced, (made, behind, count) = run_world(f"{__name__}:refused_in_a_world", 2)[0]

    assert "all_reduce of float64[3] with MAX" in wide
    assert "test_backend_contracts.py" in wide
    assert "not contiguous" in strided
    assert "begins 2 bytes behind a multiple of the size of a float32" in misplaced
    # A message outside of a batch has a communicator of its own, one of a batch that of the group.
    assert made == [("all_reduce", "pair"), ("all_reduce", "late"), ("isend", "pair")]
    assert behind == [("late", "pair")]
    assert count == (2, 1)
