"""Copies of a model that share pipeline ranks: where they are, and that together they train one model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trained import PP2, PP4, UNTIED, distance, world

from mindspeed_core.errors import UserError
from mindspeed_pp.channels import stuck
from mindspeed_pp.lint import lint
from mindspeed_pp.placement import mirrored
from mindspeed_pp.registry import rule_named
from mindspeed_pp.rule import Context
from mindspeed_pp.schedule import parse_schedule
from mindspeed_pp.schedules.chimera import DECOUPLED
from mindspeed_pp.simulator import Costs, simulate
from mindspeed_pp.transforms import waves

CHIMERA = ("--pipeline-schedule", "chimera")
FOUR = ("--virtual-data-parallel-size", "4")


def sizes():
    copies = st.sampled_from([2, 4, 8])
    return st.tuples(copies, st.integers(1, 3), st.integers(1, 3)).map(
        lambda s: (s[0] * s[1], s[0], s[0] * s[2])
    )


@settings(deadline=None)
@given(sizes())
def test_ranks_that_hold_a_stage_hold_the_same_stages(size):
    ranks, copies, _ = size
    placement = mirrored(ranks, copies)
    assert placement.problems() == ()
    for held in placement.held:
        positions = [placement.position(stage) for stage in held]
        assert positions == sorted(set(positions))
        assert len(positions) == copies
        # So a group of ranks reduces its stages in one order.
        holders = {
            rank
            for rank in range(ranks)
            if positions == [placement.position(s) for s in placement.held[rank]]
        }
        assert len(holders) == copies


@settings(deadline=None, max_examples=20)
@given(sizes(), st.booleans())
def test_every_size_can_run(size, decoupled):
    ranks, copies, microbatches = size
    schedule = rule_named("chimera").schedule(
        Context(ranks, copies, microbatches, options={DECOUPLED: decoupled})
    )
    lint(schedule)
    assert not stuck(schedule)
    assert parse_schedule(schedule.text()) == schedule
    lint(waves("waves", schedule.placement, microbatches))


@pytest.mark.parametrize(("ranks", "copies", "bubble"), [(4, 2, 2), (8, 2, 6), (8, 4, 2), (4, 4, 0)])
def test_as_many_micro_batches_as_ranks_leave_the_bubble_of_the_paper(ranks, copies, bubble):
    times = (1.0, 0.5, 0.5)
    schedule = rule_named("chimera").schedule(Context(ranks, copies, ranks, times))
    course = simulate(schedule, Costs(*times))
    assert course.bubble == bubble
    assert course.bubble == (2 * ranks / copies - 2) / 2 * 2
    assert max(course.peaks) <= ranks


def test_a_micro_batch_of_another_copy_is_refused():
    text = rule_named("chimera").schedule(Context(2, 2, 2)).text()
    with pytest.raises(UserError, match="stage 0 and micro-batch 1 comes 1 times instead of never"):
        lint(parse_schedule(text.replace("F0.0", "F0.1")))


TWO = {
    "copies": (*PP2, *CHIMERA),
    "decoupled": (*PP2, *CHIMERA, "--chimera-decouple-bw"),
    "uneven": (*PP2, *CHIMERA, "--num-layer-list", "3,1"),
    "upstream": (*PP2, "--schedules-method", "chimera"),
    "sharded": (*PP2, *CHIMERA, "--use-distributed-optimizer"),
}


def check(cases, ranks, *model, tolerance=1e-6):
    alone, found = world(cases, ranks, *model)
    for name, results in found.items():
        first = results[0]
        assert first.executed == "chimera"
        assert distance(first.gradients, alone.gradients) < tolerance, name
        assert first.drifted == {}
        for rank in results:
            assert rank.losses == pytest.approx(alone.losses, rel=1e-6)


def test_two_copies_train_what_one_process_trains():
    check({name: TWO[name] for name in ("copies", "decoupled", "sharded")}, 2)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "model", [(), (UNTIED,), ("--calculate-per-token-loss",)], ids=["tied", "untied", "tokens"]
)
def test_two_copies_of_other_models(model):
    check(TWO, 2, *model)


@pytest.mark.thorough
@pytest.mark.parametrize("model", [(), (UNTIED,)], ids=["tied", "untied"])
def test_copies_on_four_ranks(model):
    cases = {
        "pp4": (*PP4, *CHIMERA),
        "four copies": (*PP4, *CHIMERA, *FOUR),
        "dp2": (*PP2, *CHIMERA),
        "dp2, sharded": (*PP2, *CHIMERA, "--use-distributed-optimizer"),
        "four copies, sharded": (*PP4, *CHIMERA, *FOUR, "--use-distributed-optimizer"),
        "cp2": (*PP2, *CHIMERA, "--context-parallel-size", "2"),
    }
    check(cases, 4, *model, "--position-embedding-type", "rope", tolerance=1e-5)


@pytest.mark.thorough
def test_copies_of_experts_and_of_the_norm_for_clipping():
    experts = tuple("--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --clip-grad 0.1".split())
    check(
        {"experts": (*PP2, *CHIMERA)}, 2, *experts, "--moe-router-load-balancing-type", "none", tolerance=1e-5
    )
