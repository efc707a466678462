"""Fold-3D: the reduction of each chunk's gradients under the backward passes of other chunks.

Source: AscendSpeed's ``--foldx-mode``. megatron-core's ``--overlap-grad-reduce`` hides as much.
"""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_pp.actions import A, Action, D, F
from mindspeed_pp.rule import Context, schedule
from mindspeed_pp.schedules.interleaved import interleaved


@schedule("fold-aiao", chunks=None)
def fold_aiao(c: Context) -> Iterator[list[Action]]:
    """All micro-batches forward chunk by chunk, then backward; keeps the activations of all of them."""
    for r in range(c.p):
        order = [F(chunk * c.p + r, i) for chunk in range(c.v) for i in range(c.m)]
        for chunk in reversed(range(c.v)):
            order += [A(chunk * c.p + r, i) for i in range(c.m)] + [D(chunk * c.p + r)]
        yield order


@schedule("fold-fifo", chunks=None, whole_rounds=True, least=lambda p: p)
def fold_fifo(c: Context) -> Iterator[list[Action]]:
    """Interleaved, with the reduction of each chunk right behind its last backward pass."""
    for r, plain in enumerate(interleaved.build(c)):
        last = {action.stage: action for action in plain}
        yield [
            x
            for action in plain
            for x in ([action, D(action.stage)] if last[action.stage] is action else [action])
        ]
        assert r < c.p
