"""Every algorithm on four ranks by the code for NPUs, on recorded operators: arguments and precision."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from recording_npu import recording
from rectangles import definition
from test_engine_worlds import LENGTH, RULES, check, chosen, grids, members_of

from mindspeed_cp.engine.attention import CallOptions, Members, split_attention
from mindspeed_cp.engine.masks import MaskRule
from mindspeed_cp.engine.planners import RING, Grid, layout_of
from mindspeed_cp.engine.scores import Dropout, Scores
from mindspeed_cp.options import CPOptions
from mindspeed_testing import run_world


def errors(grid, members, rule, dtype):
    """Relative errors of output and gradients against float64."""
    torch.manual_seed(0)
    length = rule.length
    given_ = [torch.randn(1, n, length, 16).to(dtype) for n in (4, 2, 2, 4)]
    whole = [tensor.double().requires_grad_() for tensor in given_[:3]]
    scores, values = definition(*whole, rule, (0, length), (0, length), Scores(0.25, rule))
    expected = torch.softmax(scores, -1) @ values
    expected.backward(given_[3].double())
    position = torch.from_numpy(layout_of(grid, (rule,)).positions(members.rank))
    mine = [tensor[:, :, position].requires_grad_() for tensor in given_[:3]]
    output = split_attention(*mine, (rule,), members, CPOptions(grid), CallOptions(0.25))
    output.backward(given_[3][:, :, position])
    squares = []
    for got, want in zip((output, *(t.grad for t in mine)), (expected, *(t.grad for t in whole))):
        want = want[:, :, position]
        squares.append(torch.stack([(got.double() - want).square().sum(), want.square().sum()]))
    total = torch.stack(squares).detach()
    if grid.ranks > 1:
        dist.all_reduce(total)
    return [float(value) for value in (total[:, 0] / total[:, 1]).sqrt()]


def check_sink(grid, members, dtype, tolerance, **given_):
    """A further score of every row, against the softmax over one column more; its gradient too."""
    torch.manual_seed(0)
    rule, length = MaskRule(LENGTH, window=9), LENGTH
    q, k, v, outer = (torch.randn(2, n, length, 8, dtype=torch.float64) for n in (4, 2, 2, 4))
    sink = torch.randn(4, dtype=torch.float64)
    whole = [tensor.clone().requires_grad_() for tensor in (q, k, v, sink)]
    scores, values = definition(*whole[:3], rule, (0, length), (0, length), Scores(0.35, rule))
    column = whole[3].view(1, -1, 1, 1).expand(2, 4, length, 1)
    expected = torch.softmax(torch.cat((scores, column), -1), -1)[..., :length] @ values
    expected.backward(outer)
    position = torch.from_numpy(layout_of(grid, (rule,)).positions(members.rank))
    mine = [tensor[:, :, position].to(dtype).requires_grad_() for tensor in (q, k, v)]
    own = sink.to(dtype).requires_grad_()
    output = split_attention(*mine, (rule,), members, *chosen(grid, 0.35, sink=own, **given_))
    output.backward(outer[:, :, position].to(dtype))
    if grid.ranks > 1:
        dist.all_reduce(own.grad)
    pairs = [(output, expected), *((t.grad, w.grad) for t, w in zip(mine, whole))]
    pairs = [(got, want[:, :, position]) for got, want in pairs]
    for got, want in (*pairs, (own.grad, whole[3].grad)):
        assert (got.double() - want).norm() / want.norm() < tolerance, grid


def test_a_further_score_without_value_takes_part():
    check_sink(Grid(1), Members(0), torch.float64, 1e-9)
    with recording():
        check_sink(Grid(1), Members(0), torch.float32, 2e-6)


def every_algorithm_on_four_ranks():
    """Return the calls of operators for NPUs, and the errors of bfloat16, of every algorithm."""
    dist.init_process_group("gloo")
    calls, precision = {}, {"one process": errors(Grid(1), Members(0), MaskRule(512), torch.bfloat16)}
    matrix = np.random.default_rng(0).random((LENGTH, LENGTH)) < 0.4
    given_rule = MaskRule(LENGTH, causal=False, matrix=matrix)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    single = {"dtype": torch.float32, "tolerance": 1e-6}
    for name, grid in grids(4):
        members = members_of(grid)
        precision[name] = errors(grid, members, MaskRule(512), torch.bfloat16)
        check_sink(grid, members, torch.float64, 1e-9)
        with recording() as log:
            log.clear()
            for rule in RULES.values():
                check(grid, members, rule(LENGTH), 4, 2, LENGTH, **single)
            check(grid, members, (given_rule,), 4, 4, LENGTH, kernel_layout="BNSD", **single)
            check(grid, members, RULES["causal"](LENGTH + 5), 5, 5, LENGTH + 5, narrow=True, **single)
            check(grid, members, RULES["causal"](LENGTH), 4, 2, LENGTH, slopes=slopes, **single)
            check(grid, members, RULES["documents"](LENGTH), 4, 2, LENGTH, dropout=Dropout(0.2, 77), **single)
            if grid.method == RING and grid.outer > 1:
                for rule in ("causal", "window", "documents"):
                    check(grid, members, RULES[rule](LENGTH), 4, 2, LENGTH, fused_update=True, **single)
            calls[name] = dict(log)
        if grid.method == RING and grid.outer > 1:
            check(grid, members, RULES["documents"](LENGTH), 4, 2, LENGTH, fused_update=True, **single)
            check_sink(grid, members, torch.float32, 2e-6, fused_update=True)
    dist.barrier()
    dist.destroy_process_group()
    return calls, precision


@pytest.fixture(scope="module")
def four_ranks():
    return run_world(every_algorithm_on_four_ranks, 4)


def test_every_algorithm_asks_npus_for_what_they_compute(four_ranks):
    asked = {name: {key for calls, _ in four_ranks for key in calls[name]} for name in four_ranks[0][0]}
    for name, made in asked.items():
        for kind in ("npu_fusion_attention", "npu_fusion_attention_grad"):
            assert {(kind, "SBH", mode) for mode in (0, 1, 3, 4)} | {(kind, "BNSD", 1)} <= made, name
        ring = name in ("ring", "ring-contiguous", "double-ring", "hybrid")
        assert (("npu_ring_attention_update", "SBH", 0) in made) == ring, name
        assert {("npu_fusion_attention_v2", "SBH", 3), ("npu_fusion_attention_grad_v2", "SBH", 3)} <= made, (
            name
        )


def test_no_algorithm_is_less_exact_in_bfloat16_than_one_kernel(four_ranks):
    for _, precision in four_ranks[:1]:
        alone = precision.pop("one process")
        for name, found in precision.items():
            for part, error, single in zip(("output", "dq", "dk", "dv"), found, alone):
                assert error <= 1.5 * single, (name, part, error, single)
