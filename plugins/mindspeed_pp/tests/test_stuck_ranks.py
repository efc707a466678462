"""A pipeline rank that stops is named by those that wait for it, with its place in the schedule."""

from datetime import timedelta

import pytest
import torch.distributed as dist
from trained import set_up, trained

from mindspeed_core.errors import UserError
from mindspeed_core.feature import Feature, hookimpl
from mindspeed_pp import engine
from mindspeed_pp.actions import A, F
from mindspeed_pp.features import engine as features
from mindspeed_pp.placement import loop
from mindspeed_pp.positions import described, holding_up
from mindspeed_pp.registry import rule_named
from mindspeed_pp.rule import Context
from mindspeed_pp.schedule import made
from mindspeed_testing import run_world

RANKS = 3
SECONDS = 5


class Stops(Feature):
    """The last rank does not leave the forward pass of micro-batch 1 before the others have given up."""

    name = "stops"
    summary = "stands still in a forward pass"

    @hookimpl(wrapper=True)
    def forward_step(self, run):
        if run.dist.rank == RANKS - 1 and run.context.microbatch == 1:
            store = dist.distributed_c10d._get_default_store()
            store.wait([f"told {rank}" for rank in range(RANKS - 1)])
            raise SystemExit(0)
        return (yield)


def stopped_world():
    # Of messages alone, so that a busy machine has its time for everything else.
    for module in (engine, features):
        module.message_timeout = lambda args: timedelta(seconds=SECONDS)
    flags = ("--pipeline-model-parallel-size", str(RANKS), "--num-layers", str(RANKS))
    flags += ("--pipeline-schedule", "1f1b", "--untie-embeddings-and-output-weights")
    try:
        with set_up(*flags, probes=(Stops(),)) as run:
            trained(run, steps=1)
    except UserError as error:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"told {dist.get_rank()}", "")
        store.wait([f"told {rank}" for rank in range(RANKS - 1)])
        return str(error)
    except SystemExit:
        return ""


def test_a_rank_that_stops_is_named_with_action_micro_batch_and_chunk():
    first, second, _ = run_world(stopped_world, RANKS, timeout=120)
    for rank, text in enumerate((first, second)):
        assert f"--pipeline-schedule 1f1b: pipeline rank {rank} waited at item" in text
        assert "all wait for pipeline rank 2 (rank 2), at item 2 of 16 (F2.1: forward pass of stage 2" in text
        assert "chunk 0, micro-batch 1) for " in text
    assert "pipeline rank 1 waits too" in first
    assert "for B1.1 from pipeline rank 2" in second


def test_who_waits_for_whom_follows_from_positions():
    schedule = rule_named("1f1b").schedule(Context(3, 1, 4))
    assert holding_up(schedule, 0, {0: 3, 1: 2, 2: 1}) == [0, 1, 2]
    assert holding_up(schedule, 0, {0: 3, 1: None, 2: 1}) == [0, 1]
    assert holding_up(schedule, 0, {0: 0, 1: 0, 2: 0}) == [0]
    assert holding_up(schedule, 2, {0: -1, 1: 0, 2: 0}) == [2, 1, 0]


def test_a_place_is_described_with_stage_chunk_and_micro_batch():
    schedule = made("one", loop(1, 2), 1, [[F(0, 0), F(1, 0), A(1, 0), A(0, 0)]])
    assert (
        described(schedule, 0, 1) == "at item 1 of 4 (F1.0: forward pass of stage 1, chunk 1, micro-batch 0)"
    )
    assert described(schedule, 0, -1) == "before its first item"
    assert described(schedule, 0, 4) == "behind its last item of 4"


@pytest.mark.parametrize("batch", [0, 1])
def test_a_rank_in_another_batch_is_before_or_behind_this_one(batch):
    schedule = rule_named("1f1b").schedule(Context(2, 1, 2))
    items = {0: 2, 1: len(schedule.orders[1]) if batch else -1}
    assert holding_up(schedule, 0, items) == ([0] if batch else [0, 1])
