"""Pairs of a schedule whose passes mindspeed-moe runs by turns."""

import pytest
from trained import distance, set_up, trained

from mindspeed_core.activation import plan_for
from mindspeed_core.validation import check
from mindspeed_moe.turns import Turns
from mindspeed_pp.registry import rule_named
from mindspeed_pp.rule import Context
from mindspeed_pp.weight_gradients import WeightGradients
from mindspeed_testing import run_world
from mindspeed_testing.model_flags import training_flags

MICRO_BATCHES = 6
MODEL = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32", "--swiglu"),
    *("--disable-bias-linear", "--moe-token-dispatcher-type", "alltoall", "--moe-aux-loss-coeff", "0.01"),
    *("--untie-embeddings-and-output-weights", "--moe-grouped-gemm", "--num-layers", "4"),
    *("--moe-shared-expert-intermediate-size", "48", "--global-batch-size", str(2 * MICRO_BATCHES)),
    *("--eval-iters", "1"),
)
PP2_EP2 = (*MODEL, "--pipeline-model-parallel-size", "2", "--expert-model-parallel-size", "2")
DUAL, PAIRED = ("--schedules-method", "dualpipev"), ("--moe-fb-overlap",)
OVERLAPS = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
FURTHER = {
    "overlaps": OVERLAPS,
    "detached": ("--dualpipev-dw-detach", *OVERLAPS),
    "bf16": ("--bf16", "--moe-router-dtype", "fp32"),
    "level0": ("--moe-zero-memory", "level0"),
    "level1": ("--moe-zero-memory", "level1"),
    "recomputed": ("--pipeline-recompute",),
    "per token": ("--calculate-per-token-loss",),
    "dense and experts": ("--moe-layer-freq", "[0,1,1,0]"),
    "added in place": ("--gemm-gradient-accumulation-fusion",),
}


def noting(turns, pairs):
    """Record, for every pair, in which order its passes go on."""

    def whole(direction, work):
        def called():
            pairs[-1].append(f"{direction} begins")
            result = work()
            pairs[-1].append(f"{direction} ends")
            return result

        return called

    def waiting(direction, go):
        def called():
            if turns._pair is not None and turns._pair.is_forward() == (direction == "forward"):
                pairs[-1].append(f"{direction} waits")
            go()

        return called

    def run(forward, backward, *, go=turns.run, **options):
        pairs.append([])
        return go(whole("forward", forward), whole("backward", backward), **options)

    turns.in_forward = waiting("forward", turns.in_forward)
    turns.in_backward = waiting("backward", turns.in_backward)
    turns.run = run


def both(cases):
    """Train dualpipev with its passes one after the other, and by turns."""
    found = {}
    for name, flags in cases.items():
        sides, notes = [], []
        for further in ((), PAIRED):
            with set_up(*PP2_EP2, *DUAL, *flags, *further) as run:
                turns = run.session.state(Turns)
                noting(turns, notes)
                sides.append(trained(run, evaluates=True))
                sides[-1].pairs = turns.pairs
                sides[-1].put_off = run.session.state(WeightGradients).seen
        found[name] = *sides, notes
    return found


def compare(cases):
    ranks = run_world(both, 4, cases, timeout=600)
    for name in cases:
        for rank in ranks:
            plain, paired, _ = rank[name]
            assert paired.losses == plain.losses, name
            assert paired.evaluated == plain.evaluated, name
            assert plain.pairs == 0
            # Grouped experts of both packages leave their weight gradients to the schedule.
            assert paired.put_off == plain.put_off
        plain, paired, _ = ranks[0][name]
        assert paired.put_off > 0
        assert distance(paired.gradients, plain.gradients) == 0, name
        assert distance(paired.parameters, plain.parameters) == 0, name
        assert paired.drifted == {}, name
    return ranks


def test_pairs_go_by_turns_and_train_the_same_to_the_bit():
    schedule = rule_named("dualpipev").schedule(Context(2, 2, MICRO_BATCHES))
    for number, rank in enumerate(compare({"plain": ()})):
        _, paired, notes = rank["plain"]
        pairs = [action for action in schedule.orders[number // 2] if action.parts]
        assert len(pairs) > 3
        # Two steps; evaluation has no backward passes.
        assert paired.pairs == len(notes) == 2 * len(pairs)
        for seen in notes:
            assert seen[0] == "backward begins"
            # Its one layer exchanges twice in each direction, and the other pass goes on meanwhile.
            assert [note for note in seen if note.startswith("forward")] == [
                "forward begins",
                *["forward waits"] * 2,
                "forward ends",
            ]
            assert seen.index("forward begins") < seen.index("backward ends")
            assert seen.index("backward waits") < seen.index("forward begins") < len(seen) - 3


@pytest.mark.thorough
@pytest.mark.parametrize("name", FURTHER)
def test_pairs_train_the_same_beside_other_features(name):
    compare({name: FURTHER[name]})


def problems(*flags):
    return "\n".join(map(str, check(training_flags(flags, 1), world_size=4).problems))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--pipeline-schedule", "zbv"), "with pipeline schedule zbv: it has no forward pass beside a back"),
        (("--pipeline-schedule", "auto"), "it has no forward pass beside a backward pass; use --schedules-m"),
        (("--optimize-vpp-send-recv-comm", "--num-virtual-stages-per-pipeline-rank", "2"), "interleaved: it"),
        (("--use-nanopipe", "--num-virtual-stages-per-pipeline-rank", "2"), "schedule nanopipe: it has no"),
        ((*DUAL, "--optimized-mbs-list", "1,1,1,1,2"), "one scale of the losses of experts"),
        ((), "or --schedules-method dualpipev of mindspeed-pp"),
    ],
)
def test_schedules_without_pairs_are_refused_with_the_way_out(flags, message):
    batch = ("--micro-batch-size", "1")
    assert problems(*PP2_EP2, *batch, *DUAL, *PAIRED) == ""
    assert message in problems(*PP2_EP2, *batch, *flags, *PAIRED)


@pytest.mark.parametrize("host", ["standalone", "library", "megatron-lm"])
def test_every_host_takes_both_flags(host):
    made, _ = plan_for([*PP2_EP2, *DUAL, *PAIRED, "--transformer-impl", "local"], platform="cpu", host=host)
    assert {"pp-engine", "pp-weight-gradients", "moe-fb-overlap"} <= set(made.names)


def test_a_plan_says_whether_pairs_go_by_turns():
    flags = (*PP2_EP2, "--micro-batch-size", "1", *DUAL)
    notes = [
        "".join(map(str, check(training_flags((*flags, *further), 1), world_size=4).plan.notes))
        for further in ((), PAIRED)
    ]
    assert "pair run one after the other without --moe-fb-overlap; zbv keeps fewer then" in notes[0]
    assert "one after the other" not in notes[1]
