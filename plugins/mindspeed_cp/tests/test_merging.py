"""The results of blocks joined into one attention, and what rounding they add."""

import pytest
import torch
from rectangles import definition

from mindspeed_cp.engine.block import attend, attend_backward
from mindspeed_cp.engine.layout import zigzag
from mindspeed_cp.engine.local import zeros_for
from mindspeed_cp.engine.masks import MaskRule
from mindspeed_cp.engine.merging import FusedMerger, Merger
from mindspeed_cp.engine.scores import Scores
from mindspeed_cp.engine.tasks import tasks


def merged(kind, dtype):
    torch.manual_seed(0)
    query = torch.zeros(2, 3, 10, 4, dtype=dtype)
    merger = kind(query, 5)
    for samples, rows in ((slice(0, 2), (0, 10)), (slice(0, 2), (4, 10)), (slice(1, 2), (0, 7))):
        count = len(range(*samples.indices(2)))
        output = torch.randn(count, 3, rows[1] - rows[0], 5).to(dtype)
        logsum = 3 * torch.randn(count, 3, rows[1] - rows[0])
        logsum[:, :, 1] = float("-inf")
        merger.add(samples, rows, output.masked_fill(logsum.isinf().unsqueeze(-1), 0), logsum)
    return merger.output, merger.logsum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_update_joins_as_the_definition(dtype):
    for got, want in zip(merged(FusedMerger, dtype), merged(Merger, dtype)):
        torch.testing.assert_close(got, want)
        assert got.dtype == torch.float32


def test_the_fused_update_refuses_what_it_would_round():
    with pytest.raises(ValueError, match="queries are float64"):
        FusedMerger(torch.zeros(1, 1, 2, 2, dtype=torch.float64), 2)


def key_gradient_error(ranks):
    """Relative error of bfloat16 gradients of keys round a ring of simulated ranks."""
    torch.manual_seed(0)
    length, rule = 1024, MaskRule(1024)
    q, k, v, outer = (torch.randn(1, 2, length, 32).bfloat16() for _ in range(4))
    whole = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    scores, values = definition(*whole, rule, (0, length), (0, length), Scores(0.2, rule))
    (torch.softmax(scores, -1) @ values).backward(outer.double())
    layout = zigzag(length, ranks)
    places = [torch.from_numpy(layout.positions(rank)) for rank in range(ranks)]
    total, facts = torch.zeros(k.shape), Scores(0.2, rule)
    for rank, mine in enumerate(places):
        query = q[:, :, mine]
        chunks = [layout.chunks(block) for block in range(ranks)]
        work = [((slice(0, 1), tasks(rule, chunks[rank], held), facts),) for held in chunks]
        merger = Merger(query, 32)
        for block, held in enumerate(places):
            attend(merger, query, k[:, :, held], v[:, :, held], work[block])
        output = merger.output.bfloat16()
        for block, held in enumerate(places):
            kv = k[:, :, held], v[:, :, held]
            found = zeros_for(query, *kv)
            given_ = output, merger.logsum, outer[:, :, mine]
            attend_backward(found, query, *kv, *given_, work[block])
            total[:, :, held] += found[1]
    wanted = whole[1].grad
    return float((total.double() - wanted).norm() / wanted.norm())


def test_longer_rings_do_not_lose_precision():
    assert key_gradient_error(32) <= 1.1 * key_gradient_error(2)
