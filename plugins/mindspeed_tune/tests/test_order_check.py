from dataclasses import replace

from synthetic_ranks import every_stage, record

from mindspeed_tune.layout import Layout
from mindspeed_tune.order_check import check_order
from mindspeed_tune.record import Call

LAYOUT = Layout(16, tp=2, pp=4)


def _changed(found, change):
    calls = list(found.runs[0].calls)
    change(calls)
    return replace(found, runs=(replace(found.runs[0], calls=tuple(calls)), *found.runs[1:]))


def test_neighbours_of_every_group_agree():
    ranks = [record(LAYOUT, rank) for rank in (0, 1, 2, 4, 8, 12)]
    check = check_order(ranks)
    assert check.differences == ()
    assert check.pairs >= 5
    assert check.unchecked == ()


def test_a_swapped_pair_of_collectives_is_named_with_call_ranks_and_code():
    one = record(LAYOUT, 1)
    kinds = [call.operation for call in one.runs[0].calls]
    first = kinds.index("reduce_scatter_tensor")

    def swap_neighbours(calls):
        here = replace(calls[first], stack=("model.py:7 (forward)",))
        calls[first - 1], calls[first] = here, calls[first - 1]

    check = check_order([record(LAYOUT, 0), _changed(one, swap_neighbours)])
    [difference] = check.differences
    assert difference.ranks == (0, 1)
    assert difference.group == "TENSOR_MODEL_PARALLEL_GROUP"
    assert difference.index == first - 1
    text = str(difference)
    assert "ranks 0 and 1 differ at call" in text
    assert "rank 0: all_gather_into_tensor" in text
    assert "rank 1: reduce_scatter_tensor" in text
    assert "model.py:7 (forward)" in text


def test_another_size_or_dtype_is_a_difference():
    def shrink(calls):
        calls[2] = replace(calls[2], bytes=calls[2].bytes // 2)

    def widen(calls):
        calls[2] = replace(calls[2], dtype="float32")

    for change in (shrink, widen):
        assert check_order([record(LAYOUT, 0), _changed(record(LAYOUT, 1), change)]).differences


def test_a_missing_receive_is_named_with_its_send():
    sender, receiver = record(LAYOUT, 0), record(LAYOUT, 4)

    def lose(calls):
        calls.remove(next(call for call in calls if call.operation == "irecv" and call.peer == 0))

    [difference] = check_order([sender, _changed(receiver, lose)]).differences
    assert difference.ranks == (0, 4)
    assert difference.index == 1
    assert "isend with rank 4" in str(difference)
    assert "no further call" in str(difference)


def test_swapped_groups_block_even_where_each_group_has_its_order():
    layout = Layout(4, tp=2)

    def both(first, second):
        found = record(layout, 0 if first == 0 else 1)
        shared = replace(found.groups[0], ranks=found.groups[1].ranks, name="cp.ring")
        pair = [Call(first, "all_reduce", 8, "float32"), Call(second, "all_reduce", 8, "float32")]
        one = replace(found.runs[0], calls=tuple(pair))
        return replace(found, groups=(shared, found.groups[1]), runs=(one,))

    [difference] = check_order([both(0, 1), both(1, 0)]).differences
    assert difference.index == 0


def test_messages_that_both_ranks_begin_with_a_send_are_named_with_their_code():
    layout = Layout(2, tp=2)

    def sends_first(rank, batch):
        found = record(layout, rank)
        stack = ("ring.py:7 (forward)",)
        pair = [
            Call(0, "isend", 8, "float32", 1 - rank, stack=stack, launch_event=1, wait_event=3, batch=batch),
            Call(0, "irecv", 8, "float32", 1 - rank, stack=stack, launch_event=2, wait_event=4, batch=batch),
        ]
        shared = replace(found.groups[0], ranks=found.groups[1].ranks, name="ring")
        one = replace(found.runs[0], calls=tuple(pair))
        return replace(found, groups=(shared, *found.groups[1:]), runs=(one,), update=_silent(found.update))

    check = check_order([sends_first(0, None), sends_first(1, None)])
    assert check.differences == ()
    assert "ring: rank 0 waits for ever for isend with rank 1" in check.waiting[0]
    assert "ring.py:7 (forward)" in check.waiting[0]
    assert check_order([sends_first(0, 1), sends_first(1, 1)]).waiting == ()


def _silent(update):
    return replace(update, calls=())


def test_a_group_with_one_recorded_member_is_reported_unchecked():
    check = check_order(every_stage(LAYOUT))
    assert check.differences == ()
    assert "TENSOR_MODEL_PARALLEL_GROUP" in check.unchecked
    assert "PIPELINE_MODEL_PARALLEL_GROUP" not in check.unchecked
