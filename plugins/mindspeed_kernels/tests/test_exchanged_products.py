"""Grouped products with an exchange between two ranks, against the same rows and experts in one process."""

import pytest
import torch
import torch.distributed as dist

from mindspeed_kernels.ops import ContractError, all2all_grouped_matmul, grouped_matmul_all2all
from mindspeed_testing import run_world

RANKS, EXPERTS, WIDE, OUT, SHARED = 2, 2, 4, 3, 5
COUNTS = {
    "every expert has rows": [[[3, 1], [2, 4]], [[1, 2], [5, 1]]],
    "a rank sends none": [[[3, 1], [2, 4]], [[0, 0], [0, 0]]],
    "a rank receives none": [[[3, 1], [0, 0]], [[1, 2], [0, 0]]],
    "there are none": [[[0, 0], [0, 0]], [[0, 0], [0, 0]]],
}
"""Rows by the rank of their tokens, then by the rank and number of their expert."""


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def in_one_process(counts):
    """Rows of each rank, every expert's weight, the products of each rank's rows, and gradients of all."""
    totals = [sum(map(sum, of_rank)) for of_rank in counts]
    rows = [numbers(10 + rank, total, WIDE).requires_grad_() for rank, total in enumerate(totals)]
    weights = numbers(1, RANKS, EXPERTS, WIDE, OUT).requires_grad_()
    products = []
    for of_rank, x in zip(counts, rows):
        pieces = iter(x.split([n for part in of_rank for n in part]))
        products.append(
            torch.cat([next(pieces) @ weights[r, e] for r in range(RANKS) for e in range(EXPERTS)])
        )
    outer = [numbers(20 + rank, *product.shape) for rank, product in enumerate(products)]
    sum((product * one).sum() for product, one in zip(products, outer)).backward()
    return rows, weights, products, outer


def there_and_back(counts, as_tensors):
    """Multiply on the experts' ranks: sent there by one operator, brought back by the other with ones."""
    rank = dist.get_rank()
    rows, weights, products, outer = in_one_process(counts)
    sent = [n for part in counts[rank] for n in part]
    received = [n for of_rank in counts for n in of_rank[rank]]
    if as_tensors:
        sent, received = torch.tensor(sent), torch.tensor(received)
    x, weight = rows[rank].detach().requires_grad_(), weights[rank].detach().requires_grad_()
    shared, of_shared = numbers(3, 2, SHARED).requires_grad_(), numbers(4, SHARED, 6).requires_grad_()
    group = dist.group.WORLD
    return rows, weights, products, outer, sent, received, x, weight, shared, of_shared, group


def check_sent_first(counts, as_tensors):
    rows, weights, products, outer, sent, received, x, weight, shared, of_shared, group = there_and_back(
        counts, as_tensors
    )
    rank = dist.get_rank()
    there, dense = all2all_grouped_matmul(x, weight, group, sent, received, shared, of_shared)
    torch.testing.assert_close(dense, shared @ of_shared)
    ones = torch.eye(OUT, dtype=x.dtype).expand(EXPERTS, OUT, OUT)
    back = grouped_matmul_all2all(there, ones, group.group_name, received, sent)
    torch.testing.assert_close(back, products[rank])
    ((back * outer[rank]).sum() + dense.sum()).backward()
    torch.testing.assert_close(x.grad, rows[rank].grad)
    torch.testing.assert_close(weight.grad, weights.grad[rank])
    torch.testing.assert_close(shared.grad, of_shared.detach().sum(1).expand(2, SHARED))
    torch.testing.assert_close(of_shared.grad, shared.detach().sum(0).unsqueeze(1).expand(SHARED, 6))


def check_sent_last(counts, as_tensors):
    rows, weights, products, outer, sent, received, x, weight, shared, of_shared, group = there_and_back(
        counts, as_tensors
    )
    rank = dist.get_rank()
    ones = torch.eye(WIDE, dtype=x.dtype).expand(EXPERTS, WIDE, WIDE)
    there = all2all_grouped_matmul(x, ones, group, sent, received)
    back, dense = grouped_matmul_all2all(there, weight, group, received, sent, shared, of_shared)
    torch.testing.assert_close(back, products[rank])
    ((back * outer[rank]).sum() + dense.sum()).backward()
    torch.testing.assert_close(x.grad, rows[rank].grad)
    torch.testing.assert_close(weight.grad, weights.grad[rank])
    torch.testing.assert_close(of_shared.grad, shared.detach().sum(0).unsqueeze(1).expand(SHARED, 6))


def arrived_by_expert():
    """Rows that say where they come from and go to, as the first operator hands them out."""
    rank = dist.get_rank()
    counts = [[[2, 1], [1, 1]], [[1, 0], [1, 2]]]
    names = [100.0 * rank + 10 * r + e for r in range(2) for e in range(2) for _ in range(counts[rank][r][e])]
    ones = torch.ones(EXPERTS, 1, 1)
    sent = [n for part in counts[rank] for n in part]
    received = [n for of_rank in counts for n in of_rank[rank]]
    there = all2all_grouped_matmul(torch.tensor(names).unsqueeze(1), ones, dist.group.WORLD, sent, received)
    return there.flatten().tolist()


def refused():
    group, x, weight = dist.group.WORLD, torch.ones(3, 2), torch.ones(2, 2, 2)
    calls = [
        ([1, 1, 1], [0] * 4, {}, "send_counts must hold"),
        ([1, 1, 1, 0], [0, 0, -1, 0], {}, "recv_counts must hold"),
        ([1, 1, 0, 0], [0] * 4, {}, "must cover all 3 rows"),
        ([1, 1, 1, 0], [0] * 4, {"shared_inputs": x}, "comes with shared_inputs"),
    ]
    for sent, received, more, message in calls:
        for operator in (all2all_grouped_matmul, grouped_matmul_all2all):
            with pytest.raises(ContractError, match=message):
                operator(x, weight, group, sent, received, **more)


def everything():
    dist.init_process_group("gloo")
    for index, counts in enumerate(COUNTS.values()):
        check_sent_first(counts, as_tensors=index % 2 == 0)
        check_sent_last(counts, as_tensors=index % 2 == 1)
    refused()
    arrived = arrived_by_expert()
    dist.destroy_process_group()
    return arrived


def test_two_ranks_multiply_and_differentiate_what_one_process_does():
    arrived = run_world(everything, RANKS)
    assert arrived == [[0.0, 0.0, 100.0, 1.0], [10.0, 110.0, 11.0, 111.0, 111.0]]
