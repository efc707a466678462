"""Operators that communicate on random calls in a world of four ranks, against one formula over all ranks."""

import pytest
import torch.distributed as dist
from differential import ranks
from differential.case import WORLD_GENERATORS

from mindspeed_testing import run_world

QUICK, THOROUGH = 12, 100
OPERATORS = sorted(WORLD_GENERATORS)


def groups_of_this_rank():
    """The groups of a world of four that this rank is in: all, two crossing pairs, itself."""
    rank = dist.get_rank()
    pairs = [dist.new_group(members) for members in ([0, 1], [2, 3], [0, 2], [1, 3])]
    alone = [dist.new_group([member]) for member in range(4)]
    return [dist.group.WORLD, pairs[rank // 2], pairs[2 + rank % 2], alone[rank]]


def every_operator(first, count):
    """Return failures on this rank by operator."""
    dist.init_process_group("gloo")
    groups = groups_of_this_rank()
    failures = {}
    for name in OPERATORS:
        for seed in range(first, first + count):
            failed = ranks.run_world_case(name, WORLD_GENERATORS[name], seed, groups)
            if failed:
                failures[name] = failed
                break
    dist.barrier()
    dist.destroy_process_group()
    return failures


@pytest.fixture(scope="module")
def judged():
    return run_world(every_operator, 4, 0, QUICK)


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_of_several_ranks_is_its_formula(name, judged):
    assert [failures[name] for failures in judged if name in failures] == []


@pytest.mark.thorough
def test_operators_of_several_ranks_are_their_formulas_in_a_hundred_further_calls_each():
    judged = run_world(every_operator, 4, QUICK, THOROUGH, timeout=600.0)
    assert [text for failures in judged for text in failures.values()] == []
