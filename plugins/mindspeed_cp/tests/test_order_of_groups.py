"""Groups of a ring: ranks come to them in one order, as the first batch of a group waits for all of them."""

from types import SimpleNamespace

import pytest
import torch

from mindspeed_cp.engine import ring
from mindspeed_cp.engine.planners import Grid
from mindspeed_cp.engine.ring_table import ring_table
from mindspeed_cp.options import CPOptions


@pytest.mark.parametrize(
    ("second", "wanted"),
    [(None, ("inside", "across")), ("second", ("inside", "second", "across"))],
)
def test_ranks_of_a_double_ring_come_to_its_groups_in_one_order(monkeypatch, second, wanted):
    posted = []
    fake = SimpleNamespace(
        isend="isend",
        irecv="irecv",
        get_global_rank=lambda group, rank: rank,
        P2POp=lambda operation, buffer, peer, group: group,
        batch_isend_irecv=lambda groups: posted.append(groups[0]) or [],
    )
    monkeypatch.setattr(ring, "dist", fake)
    table, blocks = ring_table(4, window=2), range(4)
    orders = []
    for rank in blocks:
        plan = ring.RingPlan(
            table, rank, (4,) * 4, ((),) * 4, "inside", CPOptions(Grid(4)), "across", second_group=second
        )
        posted.clear()
        sending, receiving = ({block: torch.zeros(1) for block in blocks} for _ in range(2))
        ring.Transfers(plan, "keys").post([m for m in table.moves if m.post == 0], sending, receiving)
        orders.append(tuple(posted))

    assert orders == [wanted] * 4
