"""Layers computed again early: what is refused, what is taken over, evaluation, and how much is alive."""

import pytest
from optimizer_runs import opened, train

from mindspeed_core.activation import plan_for
from mindspeed_core.feature import hookimpl
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_megatron.unwrap import unwrap
from mindspeed_memory.features.proofs import BLOCK, INTERLEAVED, MODEL, PP2
from mindspeed_memory.recompute.early import EarlyPasses
from mindspeed_memory.recompute.layers import blocks
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.worlds import run_world

INSTALLED = Registry.discover()
ADVANCE, BUBBLE = ("--recompute-in-advance", *BLOCK, "1"), ("--recompute-in-bubble",)
SCHEDULE = ("--pipeline-schedule", "interleaved")
UNIFORM = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
SELECTIVE = ("--recompute-granularity", "selective")


def plan(*flags):
    return plan_for(
        training_flags(flags, 1, INSTALLED), platform="cpu", host="standalone", registry=INSTALLED
    )[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((*ADVANCE, *PP2), ("--recompute-in-advance needs virtual stages", "drop it")),
        ((*BUBBLE, *PP2), ("--recompute-in-bubble needs virtual stages", "drop it")),
        (BUBBLE, ("--recompute-in-bubble needs virtual stages",)),
        ((*ADVANCE, *INTERLEAVED, "--no-overlap-p2p-communication"), ("--no-overlap-p2p", "no wait")),
        ((*BUBBLE, *INTERLEAVED, "--no-overlap-p2p-communication"), ("--no-overlap-p2p", "no wait")),
        ((ADVANCE[0], *INTERLEAVED), ("--recompute-granularity", "whole layers")),
        ((ADVANCE[0], *INTERLEAVED, *UNIFORM), ("--recompute-method", "use block")),
        ((ADVANCE[0], *INTERLEAVED, *SELECTIVE), ("--recompute-granularity", "whole layers")),
        ((ADVANCE[0], *INTERLEAVED, *BLOCK[:4]), ("add --recompute-num-layers 1",)),
        ((*INTERLEAVED, *BLOCK, "1", "--recompute-in-advance-depth", "2"), ("needs --recompute-in-advance",)),
        ((*ADVANCE, *INTERLEAVED, "--recompute-in-advance-depth", "0"), ("-depth 0 is no number of layers",)),
        (
            (*BUBBLE, *INTERLEAVED, *BLOCK, "1"),
            ("--recompute-granularity", "both say what is computed again"),
        ),
        ((*BUBBLE, *INTERLEAVED, *SELECTIVE), ("--recompute-granularity", "both say what is computed again")),
        ((*ADVANCE, *BUBBLE, *INTERLEAVED), ("recompute-in-advance", "recompute-in-bubble")),
        ((*ADVANCE, *INTERLEAVED, "--swap-layer-input"), ("swap-layer-input", "put away at once")),
    ],
)
def test_what_cannot_work_is_refused_with_flag_and_reason(flags, words):
    with pytest.raises(PlanError) as caught:
        plan(*flags)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("flags", [ADVANCE, BUBBLE])
def test_a_schedule_of_another_package_takes_over(flags):
    made = plan(*flags, *INTERLEAVED, *SCHEDULE)
    assert "pp-engine" in made.names
    (held,) = made.held_back
    assert held.name in ("recompute-in-advance", "recompute-in-bubble")
    assert "again before their backward passes" in held.reason


class Alive:
    """Counts passes whose activations are alive, of a rank: from forward, or the second one, to backward."""

    def __init__(self):
        self.now = self.most = 0

    def begin(self):
        self.now += 1
        self.most = max(self.most, self.now)

    @hookimpl(wrapper=True)
    def build_model(self, session):
        chunks = yield
        for _, block in blocks(chunks):
            first = block.layers[0]
            session.instances.set("probe", first, "forward", self.counted(first.forward))
        return chunks

    def counted(self, forward):
        def counting(*args, **kwargs):
            output = forward(*args, **kwargs)
            node = output[0].grad_fn
            if node is not None:
                dropped = "_Checkpoint" in type(node).__name__
                if not dropped:
                    self.begin()
                output[0].register_hook(lambda gradient: self.end())
            return output

        return counting

    def end(self):
        self.now -= 1


def alive_in(flags):
    """Most passes alive on each rank, and losses."""
    again, compute_again = Alive(), EarlyPasses.compute_again

    def counted(passes, one):
        if passes._waiting.get(one):
            again.begin()
        compute_again(passes, one)

    EarlyPasses.compute_again = counted
    try:
        with opened(*MODEL, *flags, probes=[again]) as run:
            return train(run, 2), again.most
    finally:
        EarlyPasses.compute_again = compute_again


def trained(flags, evaluates=False):
    with opened(*MODEL, *flags) as run:
        found = train(run, 1)
        if evaluates:
            found.append(run.session.call("evaluate", run=run, split="valid"))
        found += train(run, 1)
        weights = [p.detach().clone() for chunk in run.model for p in unwrap(chunk).parameters()]
        return found, weights


CASES = {"advance": ADVANCE, "bubble": BUBBLE, "taken over": (*ADVANCE, *SCHEDULE)}


def two_ranks(cases):
    plain = ("--eval-iters", "1", *INTERLEAVED)
    found = {case: trained((*plain, *CASES[case]), evaluates=True) for case in cases}
    return {"plain": trained(plain, evaluates=True), **found}


@pytest.fixture(scope="module")
def ranks(asked_for):
    return run_world(two_ranks, 2, sorted(asked_for("case")), timeout=600)


@pytest.mark.parametrize(
    "case", ["advance", "bubble", pytest.param("taken over", marks=pytest.mark.thorough)]
)
def test_steps_before_and_after_an_evaluation_are_those_without(ranks, case):
    for rank in ranks:
        (plain, weights), (found, own) = rank["plain"], rank[case]
        assert str(found) == str(plain)
        assert all(one.equal(other) for one, other in zip(own, weights, strict=True))


def alive_on_two_ranks():
    return alive_in(INTERLEAVED)[1], alive_in((*INTERLEAVED, *BUBBLE))[1]


@pytest.mark.thorough
def test_the_first_rank_keeps_a_pass_less():
    assert run_world(alive_on_two_ranks, 2, timeout=600) == [(5, 4), (3, 3)]


def four_ranks():
    flags = (
        *("--num-layers", "8", "--pipeline-model-parallel-size", "4", "--global-batch-size", "8"),
        *("--num-layers-per-virtual-pipeline-stage", "1"),
    )
    return alive_in(flags), alive_in((*flags, *BUBBLE))


@pytest.mark.thorough
def test_passes_alive_on_four_ranks_are_those_of_the_page():
    found = run_world(four_ranks, 4, timeout=900)
    assert [plain[1] for plain, _ in found] == [11, 9, 7, 5]
    assert [own[1] for _, own in found] == [8, 8, 7, 5]
    assert all(str(plain[0]) == str(own[0]) for plain, own in found)
