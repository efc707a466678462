"""DualPipeV: forward passes beside backward passes, on a V-shaped placement.

Source: DeepSeek's DualPipe (arXiv 2412.19437) in its V-shaped form; MindSpeed's ``--schedules-method
dualpipev``. It pays where the two passes of a pair hide each other's communication; else ``zbv`` has the
smaller bubble.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from mindspeed_pp.actions import A, Action, B, F, O, W
from mindspeed_pp.placement import vee
from mindspeed_pp.rule import Context, schedule

DETACHED = "dw_detach"
"""Option: the last backward passes leave their weight gradients to the end."""


class _Rank:
    """The list of one rank, with the next micro-batch of each kind of pass and chunk."""

    def __init__(self, stages: tuple[int, int]) -> None:
        self.stages = stages
        self.order: list[Action] = []
        self._next = {"F0": 0, "F1": 0, "B0": 0, "B1": 0}
        self._weights: deque[Action] = deque()

    def take(self, kind: str) -> tuple[int, int]:
        """Return stage and micro-batch of the next pass of a kind."""
        self._next[kind] += 1
        return self.stages[int(kind[1])], self._next[kind] - 1

    def forward(self, chunk: int) -> None:
        self.order.append(F(*self.take(f"F{chunk}")))

    def backward(self, chunk: int, splits: bool = False) -> None:
        place = self.take(f"B{chunk}")
        self.order.append((B if splits else A)(*place))
        if splits:
            self._weights.append(W(*place))

    def weight(self) -> None:
        if self._weights:
            self.order.append(self._weights.popleft())

    def pair(self, ahead: int, behind: int) -> None:
        """Append a forward pass of one chunk beside a backward pass of the other."""
        self.order.append(O(F(*self.take(f"F{ahead}")), A(*self.take(f"B{behind}"))))


@schedule("dualpipev", chunks=2, splits=True, place=lambda p, v: vee(p), least=lambda p: 2 * p)
def dual_pipe_v(c: Context) -> Iterator[list[Action]]:
    """Forward beside backward passes, V-shaped; pays with a combined pass of experts."""
    detached = bool(c.options.get(DETACHED))
    for r in range(c.p):
        rank, after = _Rank((r, 2 * c.p - 1 - r)), c.p - r - 1
        for _ in range(2 * after):
            rank.forward(0)
        for _ in range(r + 1):
            rank.forward(0)
            rank.forward(1)
        for _ in range(after):
            rank.backward(1, splits=True)
            rank.weight()
            rank.forward(1)
        for i in range(c.m - 2 * c.p + r + 1):
            if i == 0 and after == 0:
                # Apart, so that the rank before gets its gradient sooner.
                rank.forward(0)
                rank.backward(1)
            else:
                rank.pair(0, 1)
            rank.pair(1, 0)
        for _ in range(after):
            rank.backward(1)
            rank.pair(1, 0)
        half, late = (r + 1) // 2, False
        for i in range(r + 1):
            late = late or (detached and i == half and r % 2 == 1)
            rank.backward(1, late)
            late = late or (detached and i == half and r % 2 == 0)
            rank.backward(0, late)
        for _ in range(after):
            rank.weight()
            rank.backward(0, late)
        for _ in range(r + 1):
            rank.weight()
        yield rank.order
