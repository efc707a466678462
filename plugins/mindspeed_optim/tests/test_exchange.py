"""Shards of matrices meet on one of their holders, and go back, whatever lies where."""

import random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_optim.muon.exchange import Exchange, owners
from mindspeed_testing import run_world

costs_and_holders = st.integers(1, 5).flatmap(
    lambda ranks: st.lists(
        st.tuples(st.integers(1, 1000), st.sets(st.integers(0, ranks - 1), min_size=1)), max_size=12
    )
)


@given(costs_and_holders)
def test_each_matrix_goes_to_a_holder_and_nobody_gets_more_than_needed(drawn):
    costs = [float(cost) for cost, _ in drawn]
    held = [dict.fromkeys(ranks, (0, 1)) for _, ranks in drawn]
    chosen = owners(costs, held)
    assert all(owner in pieces for owner, pieces in zip(chosen, held))
    if drawn and all(len(pieces) == max(map(len, held)) for pieces in held):
        ranks = len(held[0])
        load = {rank: sum(c for c, o in zip(costs, chosen) if o == rank) for rank in range(ranks)}
        if all(set(pieces) == set(range(ranks)) for pieces in held):
            assert max(load.values()) <= sum(costs) / ranks + max(costs)


def test_of_holders_with_as_little_to_do_the_one_with_the_largest_piece_owns():
    assert owners([1.0], [{0: (0, 2), 1: (2, 9), 2: (9, 10)}]) == [1]


def cuts(seed, ranks):
    """Matrices of random sizes cut anywhere among ranks, some of which have nothing at all."""
    rng = random.Random(seed)
    held, sizes = [], []
    for _ in range(rng.randint(1, 8)):
        size = rng.randint(1, 40)
        borders = sorted(rng.randint(0, size) for _ in range(ranks - 1))
        pairs = zip([0, *borders], [*borders, size])
        held.append({rank: pair for rank, pair in enumerate(pairs) if pair[0] < pair[1]})
        sizes.append(size)
    return held, sizes


def exchanged(seeds):
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wrong, like = [], torch.empty(0)
    for seed in seeds:
        held, sizes = cuts(seed, ranks)
        matrices = [torch.arange(float(size)) + 1000 * index for index, size in enumerate(sizes)]
        plan = Exchange(dist.group.WORLD, [float(size) for size in sizes], held)
        own = {i: matrices[i][slice(*held[i][rank])] for i in range(len(sizes)) if rank in held[i]}
        wholes = plan.gather(own, like)
        if not all(torch.equal(wholes[index], matrices[index]) for index in plan.owned):
            wrong.append((seed, "gathered"))
        back = plan.scatter({index: -whole for index, whole in wholes.items()}, like)
        if back.keys() != own.keys() or not all(torch.equal(back[i], -own[i]) for i in own):
            wrong.append((seed, "scattered"))
        owned = torch.tensor([float(index in plan.owned) for index in range(len(sizes))])
        dist.all_reduce(owned)
        if owned.tolist() != [1.0] * len(sizes):
            wrong.append((seed, "owned"))
    dist.destroy_process_group()
    return wrong


@pytest.mark.parametrize("ranks", [2, 4])
def test_pieces_arrive_in_their_places_and_updates_come_back(ranks):
    assert run_world(f"{__name__}:exchanged", ranks, list(range(25)), timeout=100) == [[]] * ranks


class Group:
    """Two ranks, seen from the first."""

    def rank(self):
        return 0

    def size(self):
        return 2


def test_what_lies_on_one_rank_is_not_sent(monkeypatch):
    monkeypatch.setattr(dist, "all_to_all_single", lambda *a, **n: pytest.fail("sends"))
    plan = Exchange(Group(), [1.0, 1.0], [{0: (0, 4)}, {1: (0, 4)}])
    found = plan.gather({0: torch.ones(4)}, torch.empty(0))
    assert plan.scatter(found, torch.empty(0)).keys() == {0}
    assert plan.sent == 0


def test_what_is_sent_is_counted():
    assert Exchange(Group(), [1.0], [{0: (0, 3), 1: (3, 4)}]).sent == 1
    assert Exchange(Group(), [1.0], [{0: (0, 1), 1: (1, 4)}]).sent == 1
