"""The functions for any process group: lengths and heads that divide by nothing, ranks without tokens."""

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_engine_worlds import dense

from mindspeed_cp.engine.attention import CallOptions
from mindspeed_cp.engine.masks import MaskRule
from mindspeed_cp.functional import (
    Mask,
    gathered_attention,
    hybrid_attention,
    ring_attention,
    ulysses_attention,
)
from mindspeed_testing import run_world

PAGE = Path(__file__).parents[1] / "src" / "mindspeed_cp" / "docs" / "context-parallel.md"


def check(function, groups, lengths, mask, heads, key_heads, lengths_given):
    torch.manual_seed(0)
    total, rank = sum(lengths), dist.get_rank()
    sizes = ((heads, 8), (key_heads, 8), (key_heads, 6), (heads, 6))
    whole = [torch.randn(total, 2, n, width, dtype=torch.float64) for n, width in sizes]
    inputs = [tensor.clone().requires_grad_() for tensor in whole[:3]]
    rule = MaskRule(total, mask.causal, mask.ends, mask.window)
    expected = dense(*(tensor.permute(1, 2, 0, 3) for tensor in inputs), (rule, rule), CallOptions(8**-0.5))
    expected = expected.permute(2, 0, 1, 3)
    expected.backward(whole[3])
    place = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
    mine = [tensor[place].clone().requires_grad_() for tensor in whole[:3]]
    output = function(*mine, *groups, lengths if lengths_given else None, mask=mask)
    output.backward(whole[3][place])
    for got, want in zip((output, *(t.grad for t in mine)), (expected, *(t.grad for t in inputs))):
        torch.testing.assert_close(got, want[place], rtol=1e-9, atol=1e-9)


def every_function(ranks):
    dist.init_process_group("gloo")
    world, rank = dist.group.WORLD, dist.get_rank()
    functions = [(ulysses_attention, (world,)), (ring_attention, (world,)), (gathered_attention, (world,))]
    if ranks == 4:
        inner = [dist.new_group(part) for part in ([0, 1], [2, 3])][rank // 2]
        outer = [dist.new_group(part) for part in ([0, 2], [1, 3])][rank % 2]
        functions.append((hybrid_attention, (world, inner, outer)))
    lengths = {2: [(63, 62), (0, 9)], 4: [(64, 63, 63, 63), (5, 0, 7, 0)]}[ranks]
    for (function, groups), given in itertools.product(functions, lengths):
        total = sum(given)
        check(function, groups, given, Mask(), 5, 5, lengths_given=False)
        check(function, groups, given, Mask(causal=False), 4, 2, lengths_given=True)
        check(function, groups, given, Mask(ends=(3, total // 2, total)), 5, 1, lengths_given=True)
        check(function, groups, given, Mask(window=4), 4, 4, lengths_given=True)
    query = torch.zeros(3, 1, ranks, 8)
    with pytest.raises(ValueError, match="give rank"):
        ring_attention(query, query, query, world, [4] * ranks)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.thorough), 4])
def test_lengths_and_heads_need_not_divide(ranks):
    run_world(every_function, ranks, ranks)


def documented():
    page = PAGE.read_text(encoding="utf-8")
    blocks = [part.split("```")[0] for part in page.split("```python\n")[1:]]
    (snippet,) = [block for block in blocks if "mindspeed_cp.functional" in block]
    exec(compile(snippet, str(PAGE), "exec"), {})
    dist.barrier()
    dist.destroy_process_group()


def test_what_the_page_shows_runs():
    run_world(documented, 2)
