"""Random schedules that can run: a random order of everything that has to be done, on a random placement."""

import random

from mindspeed_pp.actions import A, B, F, W
from mindspeed_pp.placement import Placement
from mindspeed_pp.schedule import made, needs, provides


def random_schedule(seed, ranks=None, chunks=None, microbatches=None, splits=None):
    """A random topological order: whatever its dependencies allow may come next, on any rank."""
    draw = random.Random(seed)
    ranks, chunks = ranks or draw.choice((2, 3, 4)), chunks or draw.choice((1, 2, 3))
    microbatches = microbatches or draw.randint(1, 5)
    stages = [rank for rank in range(ranks) for _ in range(chunks)]
    draw.shuffle(stages)
    splits = draw.random() < 0.7 if splits is None else splits
    placement = Placement(tuple(stages))
    backward = (B, W) if splits else (A,)
    todo = [
        op(stage, i) for stage in range(len(stages)) for i in range(microbatches) for op in (F, *backward)
    ]
    orders = [[] for _ in range(ranks)]
    plain = made("random", placement, microbatches, orders)
    done = set()
    while todo:
        able = [action for action in todo if all(need in done for need in needs(action, plain))]
        action = draw.choice(able)
        todo.remove(action)
        done.update(provides(action))
        orders[stages[action.stage]].append(action)
    return made("random", placement, microbatches, orders)
