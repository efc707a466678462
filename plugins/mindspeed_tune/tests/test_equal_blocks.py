"""Blocks that stand for others in a dry run keep, allocate and compute what all of them would."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from mindspeed_cp.engine.local import LocalAttention, work_with
from mindspeed_cp.engine.masks import MaskRule
from mindspeed_cp.engine.scores import Scores
from mindspeed_kernels.ops import npu_fusion_attention, npu_rotary_position_embedding, rms_norm, swiglu
from mindspeed_megatron import equal_blocks
from mindspeed_megatron.fake.tensors import AnsweringMode, ShapesOnly, shapes_only
from mindspeed_megatron.instruments.storage import StorageTracker
from mindspeed_megatron.instruments.work_counter import WorkCounter


def rectangles(length: int = 3000):
    q, k, v = (torch.empty(1, 2, length, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    rule = MaskRule(length, window=700)
    chunks = ((0, (0, length)),)
    scores = Scores(0.25, rule, torch.arange(2))
    return LocalAttention.apply(q, k, v, work_with([(slice(0, 1), scores)], chunks, chunks))


def banded():
    q, k, v = (torch.empty(3000, 1, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    options = {"scale": 0.25, "pre_tokens": 500, "next_tokens": 0, "sparse_mode": 4}
    hides = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    return npu_fusion_attention(q, k, v, 2, "SBH", atten_mask=hides, **options)[0]


OPERATORS = {
    "swiglu": lambda: swiglu(torch.empty(3001, 1, 512, dtype=torch.bfloat16, requires_grad=True)),
    "rms_norm": lambda: rms_norm(
        torch.empty(5001, 1, 512, dtype=torch.bfloat16, requires_grad=True),
        torch.empty(512, requires_grad=True),
    ),
    "rotary": lambda: npu_rotary_position_embedding(
        torch.empty(5001, 1, 8, 64, dtype=torch.bfloat16, requires_grad=True),
        torch.empty(5001, 1, 1, 64),
        torch.empty(5001, 1, 1, 64),
    ),
    "split attention": rectangles,
    "banded attention": banded,
}


def measured(build, blocks_stand_for_others: bool):
    """Return the bytes kept for backward, the peaks of both directions, and the work."""
    tracker, work = StorageTracker("cpu"), WorkCounter()
    with ExitStack() as stack:
        stack.enter_context(shapes_only(ShapesOnly(), AnsweringMode()))
        stack.enter_context(tracker)
        patched = stack.enter_context(pytest.MonkeyPatch.context())
        patched.setattr(equal_blocks, "_dry", blocks_stand_for_others)
        stack.enter_context(work)
        work.key = "forward"
        result = build()
        kept, forward = tracker.alive, tracker.peak
        work.key = "backward"
        tracker.reset_peak()
        result.backward(torch.empty_like(result))
        return kept, forward, tracker.peak, work.work


@pytest.mark.parametrize("name", OPERATORS)
def test_blocks_that_stand_for_others_change_no_number(name):
    every, some = (measured(OPERATORS[name], stand) for stand in (False, True))
    assert some == every


def test_of_many_blocks_three_run():
    with equal_blocks.without_values():
        seen = [(block, equal_blocks.times()) for block in equal_blocks.run_blocks("aaaaabcc", str)]
    assert seen == [("a", 1), ("a", 3), ("a", 1), ("b", 1), ("c", 1), ("c", 1)]
    assert equal_blocks.times() == 1


def test_outside_of_dry_runs_all_blocks_run():
    assert list(equal_blocks.run_blocks("aaaa", str)) == list("aaaa")
