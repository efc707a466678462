"""ZB-V: the stages of the model run down the ranks and up again, so that no rank waits for the last one.

Source of the idea: "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362).
"""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_pp.actions import Action
from mindspeed_pp.placement import vee
from mindspeed_pp.rule import Context, schedule


@schedule("zbv", chunks=2, splits=True, place=lambda p, v: vee(p))
def zbv(c: Context) -> Iterator[list[Action]]:
    """Weight gradients in the bubble of a V-shaped placement, with the memory of 1F1B on every rank."""
    for r in range(c.p):
        stages = (r, 2 * c.p - 1 - r)
        done: dict[str, int] = dict.fromkeys(("F0", "F1", "B0", "B1", "W0", "W1"), 0)
        order: list[Action] = []

        def do(
            names: str,
            times: int = 1,
            done: dict[str, int] = done,
            order: list[Action] = order,
            stages: tuple[int, int] = stages,
        ) -> None:
            for name in names.split() * max(0, times):
                if done[name] < c.m:
                    order.append(Action(name[0], stages[int(name[1])], done[name]))
                    done[name] += 1

        do("F0", 2 * (c.p - r) - 1)
        do("F1 F0", r)
        do("F1 B1 W1", c.p - r)
        while done["F1"] < done["F0"] or done["F0"] < c.m:
            do("F0 B0 W0 F1 B1 W1")
        do("B0 B1", r)
        do("B0 W0", c.p - r)
        do("B1 B0", c.m)
        do("W1", c.m)
        do("W0", c.m)
        yield order
