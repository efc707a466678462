"""The pipeline over exchanges, on two ranks: its order in both directions, and the same numbers."""

import pytest
import torch
import torch.distributed as dist

from mindspeed_testing import run_world

ITEMS, EACH, HIDDEN = 3, 2, 4
FORWARD = (
    *("dispatch 0 launch", "dispatch 1 launch", "dispatch 0 wait", "compute 0", "combine 0 launch"),
    *("dispatch 2 launch", "dispatch 1 wait", "compute 1", "combine 1 launch"),
    *("dispatch 2 wait", "compute 2", "combine 2 launch"),
    *("combine 0 wait", "combine 1 wait", "combine 2 wait"),
)


def both_ways(rank, order, *, gathers):
    """Run a pipeline of unlike functions, and the same without one; return events and numbers.

    Args:
        rank: of this process.
        order: runs the items.
        gathers: unequally many rows of both ranks meet behind the exchange.
    """
    from unittest.mock import patch

    from mindspeed_moe import launch_wait
    from mindspeed_moe.chunked import Item

    events, exchanges = [], []
    start, finish = launch_wait.Exchange.start, launch_wait.Exchange.finish
    # Rank 0 keeps one row of an item more than it gives away.
    sizes = [EACH + 1, EACH - 1] if gathers else [EACH, EACH]

    def new_start(self, rows, *, mirrored):
        exchanges.append(self)
        self.direction = "B" if mirrored else "F"
        events.append(f"{self.direction} {self.name} launch")
        return start(self, rows, mirrored=mirrored)

    def new_finish(self):
        events.append(f"{self.direction} {self.name} wait")
        return finish(self)

    def leaves():
        made = torch.Generator().manual_seed(rank)
        rows = torch.randn(ITEMS, sum(sizes), HIDDEN, dtype=torch.float64, generator=made)
        weights = torch.randn(ITEMS, HIDDEN, HIDDEN, dtype=torch.float64, generator=made)
        return rows.requires_grad_(), weights.requires_grad_()

    def compute(weights, key, rows):
        events.append(f"F compute {key}")
        results = torch.tanh(rows @ weights[key])
        results.register_hook(lambda gradient: events.append(f"B compute {key}"))
        return results

    def trained(way):
        rows, weights = leaves()
        results = torch.stack(way(rows.unbind(), weights.unbind()))
        results.square().sum().backward()
        return results.detach(), rows.grad, weights.grad

    def hops(key):
        world, here = dist.group.WORLD, [sizes[rank]] * 2
        there = [launch_wait.AllToAll(f"dispatch {key}", world, here, sizes)]
        back = [launch_wait.AllToAll(f"combine {key}", world, sizes, here)]
        if gathers:
            rows = [2 * size for size in sizes]
            there.append(launch_wait.GatherRows(f"gather {key}", world, rows))
            back.insert(0, launch_wait.ReduceRows(f"scatter {key}", world, rows))
        return there, back

    def in_a_pipeline(rows, weights):
        items = [Item(key, part, *hops(key)) for key, part in enumerate(rows)]
        return order(items, lambda key, here: compute(weights, key, here))

    def one_by_one(rows, weights):
        results = []
        for key, part in enumerate(rows):
            there, back = hops(key)
            for made in there:
                part = made.wait(made.launch(part))
            part = compute(weights, key, part)
            for made in back:
                part = made.wait(made.launch(part))
            results.append(part)
        return results

    plain = trained(one_by_one)
    events.clear()
    with (
        patch.object(launch_wait.Exchange, "start", new_start),
        patch.object(launch_wait.Exchange, "finish", new_finish),
    ):
        piped = trained(in_a_pipeline)
    kept = sum(bool(made._work or made._buffers) for made in exchanges)
    return events, kept, [torch.equal(a, b) for a, b in zip(piped, plain, strict=True)]


def run():
    from mindspeed_moe.chunked import pipelined, pipelined_apart

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    try:
        return {
            "exchanged": both_ways(rank, pipelined, gathers=False),
            "gathered": both_ways(rank, pipelined, gathers=True),
            "apart": both_ways(rank, pipelined_apart, gathers=True),
        }
    finally:
        dist.destroy_process_group()


CASES = ("exchanged", "gathered", "apart")


@pytest.fixture(scope="module")
def ranks():
    return run_world(run, 2)


def directed(events, direction):
    return tuple(event[2:] for event in events if event.startswith(direction))


def in_flight(events):
    """Yield each event with the exchanges that are in flight then."""
    flying = set()
    for event in events:
        name, _, what = event.rpartition(" ")
        if what == "launch":
            flying.add(name)
        elif what == "wait":
            flying.remove(name)
        yield event, set(flying)


def test_rows_of_the_next_item_travel_while_one_is_computed(ranks):
    for rank in ranks:
        events, _, _ = rank["exchanged"]
        assert directed(events, "F") == FORWARD


@pytest.mark.parametrize("case", ["exchanged", "gathered"])
def test_backward_computes_every_item_while_others_travel(ranks, case):
    for rank in ranks:
        events, _, _ = rank[case]
        backward = directed(events, "B")
        for event, flying in in_flight(backward):
            # The last one that is computed has nothing left to hide but the rows of the one before.
            assert flying or not event.startswith("compute"), (event, backward)
    events, _, _ = ranks[0]["exchanged"]
    assert directed(events, "B")[:3] == ("combine 2 launch", "combine 1 launch", "combine 0 launch")


def test_both_kinds_of_exchanges_travel_while_an_item_is_computed(ranks):
    for rank in ranks:
        forward = dict(in_flight(directed(rank["gathered"][0], "F")))
        assert forward["compute 0"] == {"gather 1", "dispatch 2"}
        assert forward["compute 1"] == {"gather 2", "scatter 0"}
        assert forward["compute 2"] == {"scatter 1", "combine 0"}


@pytest.mark.parametrize("direction", ["F", "B"])
def test_apart_exchanges_travel_beside_computation_and_gathers_beside_one_another(ranks, direction):
    for rank in ranks:
        events = list(in_flight(directed(rank["apart"][0], direction)))
        for event, flying in events:
            kinds = {name.split()[0] in ("gather", "scatter") for name in flying}
            assert len(kinds) < 2, (event, flying)
            if event.startswith("compute"):
                assert kinds == {False}, (event, flying)
        assert any(len(flying) == 2 and "gather 1" in flying for _, flying in events)


@pytest.mark.parametrize("case", CASES)
def test_numbers_and_gradients_are_those_without_a_pipeline(ranks, case):
    assert all(all(rank[case][2]) for rank in ranks)


@pytest.mark.parametrize("case", CASES)
def test_no_handle_outlives_its_wait(ranks, case):
    assert [rank[case][1] for rank in ranks] == [0, 0]
