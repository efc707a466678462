"""Schedules beside other parallelism, uneven stages, other losses: each against one process."""

import pytest
from trained import distance, flags_of, world

from mindspeed_pp.schedules import BUILT_IN

PP2, PP4 = (("--pipeline-model-parallel-size", size) for size in ("2", "4"))
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
OVERLAPS = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
ALIGNED = ("--no-align-grad-reduce", "--no-align-param-gather")
UNTIED = "--untie-embeddings-and-output-weights"
LAYOUT = "--pipeline-model-parallel-layout"

TWO_RANKS = {
    "zbv": ("zbv", ()),
    "zbv-uneven": ("zbv", (LAYOUT, "Et|tt||tL")),
    "zbv-empty-ends": ("zbv", (LAYOUT, "E|tttt||L")),
    "zb-h1-uneven": ("zb-h1", (LAYOUT, "Ettt|tL")),
    "zbi-empty": ("zbi", (LAYOUT, "E|tt||tt|t|L", "--num-layers", "5")),
    "auto": ("auto", ()),
    "recomputed-1f1b": ("1f1b", ("--pipeline-recompute",)),
    "recomputed-zbv": ("zbv", ("--pipeline-recompute",)),
    "recomputed-interleaved": ("interleaved", ("--pipeline-recompute",)),
    "greedy": ("zb-h1", ("--pipeline-w-placement", "greedy", "--pipeline-times", "1", "1.5", "0.5")),
}
FOUR_RANKS = {
    "tp2-zbv": ("zbv", (*PP2, *TP2)),
    "tp2-zb-h1": ("zb-h1", (*PP2, *TP2)),
    "dp2-zbv": ("zbv", (*PP2, *OVERLAPS)),
    "dp2-zb-h1": ("zb-h1", (*PP2, *OVERLAPS)),
    "dp2-zbi": ("zbi", (*PP2, *OVERLAPS)),
    "dp2-zbi-unaligned": ("zbi", (*PP2, *OVERLAPS, *ALIGNED)),
    "dp2-nanopipe": ("nanopipe", (*PP2, "--use-distributed-optimizer", "--overlap-grad-reduce")),
    "dp2-fold-aiao": ("fold-aiao", (*PP2, *OVERLAPS)),
}


def compared(cases, ranks, *model, tolerance=1e-6):
    flags = {name: flags_of(schedule, *further) for name, (schedule, further) in cases.items()}
    alone, found = world(flags, ranks, *model)
    for name, rank in found.items():
        assert distance(rank[0].gradients, alone.gradients) <= tolerance, name
        assert rank[0].losses == pytest.approx(alone.losses, rel=1e-6), name
    return alone, found


@pytest.mark.thorough
@pytest.mark.parametrize(
    "model", [(), (UNTIED,), ("--calculate-per-token-loss",)], ids=["tied", "untied", "per-token"]
)
def test_placements_at_two_ranks(model):
    cases = {name: (s, (*PP2, *f)) for name, (s, f) in TWO_RANKS.items() if "--num-layers" not in f}
    compared(cases, 2, *model)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "model", [(), (UNTIED,), (UNTIED, "--calculate-per-token-loss")], ids=["tied", "untied", "per-token"]
)
def test_beside_other_parallelism(model):
    # Tensor parallelism adds in another order than one process.
    compared(FOUR_RANKS, 4, *model, tolerance=1e-5)


@pytest.mark.thorough
def test_every_schedule_at_four_ranks():
    cases = {rule.name: (rule.name, PP4) for rule in BUILT_IN}
    compared(cases, 4, UNTIED, "--num-layers", "8")


def test_tied_embeddings_on_one_rank_empty_stages_and_passes_computed_again():
    names = ("zbv", "zbv-empty-ends", "recomputed-zbv")
    compared({name: (TWO_RANKS[name][0], (*PP2, *TWO_RANKS[name][1])) for name in names}, 2)
