"""The pipeline over exchanges, on two ranks: its order in both directions, and the same numbers."""

import pytest
import torch
import torch.distributed as dist

from mindspeed_core.testing import run_world

ITEMS, EACH, HIDDEN = 3, 2, 4
FORWARD = (
    *("dispatch 0 launch", "dispatch 1 launch", "dispatch 0 wait", "compute 0", "combine 0 launch"),
    *("dispatch 2 launch", "dispatch 1 wait", "compute 1", "combine 1 launch"),
    *("dispatch 2 wait", "compute 2", "combine 2 launch"),
    *("combine 0 wait", "combine 1 wait", "combine 2 wait"),
)


def both_ways(rank):
    """Run a pipeline of unlike functions, and the same without one; return events and numbers."""
    from unittest.mock import patch

    from mindspeed_moe import launch_wait
    from mindspeed_moe.chunked import Item, pipelined

    events, exchanges = [], []
    start, finish = launch_wait.Exchange.start, launch_wait.Exchange.finish

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
        rows = torch.randn(ITEMS, 2 * EACH, HIDDEN, dtype=torch.float64, generator=made)
        weights = torch.randn(ITEMS, HIDDEN, HIDDEN, dtype=torch.float64, generator=made)
        return rows.requires_grad_(), weights.requires_grad_()

    def compute(weights, key, rows):
        events.append(f"F compute {key}")
        rows.register_hook(lambda gradient: events.append(f"B compute {key}"))
        return torch.tanh(rows @ weights[key])

    def trained(way):
        rows, weights = leaves()
        results = torch.stack(way(rows.unbind(), weights.unbind()))
        results.square().sum().backward()
        return results.detach(), rows.grad, weights.grad

    equal = [EACH, EACH]

    def exchange(name):
        return launch_wait.AllToAll(name, dist.group.WORLD, equal, equal)

    def in_a_pipeline(rows, weights):
        items = [
            Item(key, part, exchange(f"dispatch {key}"), exchange(f"combine {key}"))
            for key, part in enumerate(rows)
        ]
        return pipelined(items, lambda key, here: compute(weights, key, here))

    def one_by_one(rows, weights):
        def travel(part):
            made = exchange("plain")
            return made.wait(made.launch(part))

        return [travel(compute(weights, key, travel(part))) for key, part in enumerate(rows)]

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
    dist.init_process_group("gloo")
    try:
        return both_ways(dist.get_rank())
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks():
    return run_world(run, 2)


def directed(events, direction):
    return tuple(event[2:] for event in events if event.startswith(direction))


def test_rows_of_the_next_item_travel_while_one_is_computed(ranks):
    for events, _, _ in ranks:
        assert directed(events, "F") == FORWARD


def test_backward_computes_every_item_while_others_travel(ranks):
    for events, _, _ in ranks:
        backward = directed(events, "B")
        assert backward[:3] == ("combine 2 launch", "combine 1 launch", "combine 0 launch")
        for item in range(ITEMS):
            at = backward.index(f"compute {item}")
            begun = {event for event in backward[:at] if event.endswith("launch")}
            ended = {event.replace("wait", "launch") for event in backward[:at] if event.endswith("wait")}
            flying = begun - ended
            # The last one that is computed has nothing left to hide but the rows of the one before.
            assert flying, (item, backward)


def test_numbers_and_gradients_are_those_without_a_pipeline(ranks):
    assert all(all(same) for _, _, same in ranks)


def test_no_handle_outlives_its_wait(ranks):
    assert [kept for _, kept, _ in ranks] == [0, 0]
