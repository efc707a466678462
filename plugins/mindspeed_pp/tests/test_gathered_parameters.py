"""Parameters that the distributed optimizer gathers where a schedule says so."""

from unittest.mock import patch

import pytest
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from trained import PP2, UNTIED, distance, set_up, trained

from mindspeed_pp.actions import G
from mindspeed_pp.registry import rule_named
from mindspeed_pp.rule import Context
from mindspeed_pp.schedule import made
from mindspeed_testing import run_world

OVERLAPS = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
MODEL = (*PP2, UNTIED, "--num-virtual-stages-per-pipeline-rank", "2", "--lr", "0.01")
STEPS = 3


def gathering(microbatches):
    """The interleaved schedule, with the gathering of each stage right before its first forward pass."""
    plain = rule_named("interleaved").schedule(Context(2, 2, microbatches))
    orders = []
    for order in plain.orders:
        more = []
        for action in order:
            first = action.op == "F" and action.microbatch == 0
            more += [*([G(action.stage)] if first else []), action]
        orders.append(more)
    return made("gathering", plain.placement, microbatches, orders)


def noted(run, items):
    """Train, and record in which item of the schedule a bucket of which chunk begins to be gathered."""
    chunks = {
        id(group): chunk
        for chunk, model in enumerate(run.model)
        for group in (*model.bucket_groups, *model.expert_parallel_bucket_groups)
    }
    start = _ParamAndGradBucketGroup.start_param_sync

    def starting(self, force_sync=False):
        items.append((chunks[id(self)], run.context.doing.rpartition(", ")[2]))
        return start(self, force_sync)

    with patch.object(_ParamAndGradBucketGroup, "start_param_sync", starting):
        return trained(run, steps=STEPS, gathers=False)


def both(path):
    cases = {
        "by hand": ("--pipeline-schedule-file", path),
        "at the beginning": ("--pipeline-schedule", "interleaved"),
    }
    found = {}
    for name, flags in cases.items():
        with set_up(*MODEL, *OVERLAPS, *flags) as run:
            items = []
            losses = noted(run, items).losses
            found[name] = trained(run, steps=0), items
            found[name][0].losses = losses
    with set_up(*MODEL, "--pipeline-schedule", "interleaved") as run:
        found["whole"] = trained(run, steps=STEPS), []
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    path = tmp_path_factory.mktemp("orders") / "gathering.txt"
    path.write_text(gathering(4).text())
    return run_world(both, 4, str(path), timeout=300)


def test_parameters_are_gathered_by_the_action_and_by_nothing_else(ranks):
    for number, rank in enumerate(ranks):
        _, items = rank["by hand"]
        stages = [number // 2, number // 2 + 2]
        assert set(items) == {(chunk, f"G{stage}") for chunk, stage in enumerate(stages)}
        # Of every step but the first one, whose weights are whole.
        assert len(items) % (STEPS - 1) == 0
        assert {item for _, item in rank["at the beginning"][1]} == {""}


def test_passes_use_what_was_gathered(ranks):
    for rank in ranks:
        by_hand, whole = rank["by hand"][0], rank["whole"][0]
        assert by_hand.losses == rank["at the beginning"][0].losses
        assert by_hand.losses == pytest.approx(whole.losses, rel=1e-6)
        assert len(set(by_hand.losses)) == STEPS
    one, other = (ranks[0][name][0] for name in ("by hand", "at the beginning"))
    assert distance(one.parameters, other.parameters) == 0
    assert one.drifted == {}
