"""Ranks are counted to execute what the formula says, for every kind of model and layout."""

import pytest

from mindspeed_testing import run_world

LAYERS = 4
COUNT = ("--op-cal-tflops", "--peak-tflops", "1")
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2")
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules", "core_attn")
GQA = ("--group-query-attention", "--num-query-groups", "2", "--swiglu", "--disable-bias-linear")
UNTIED = ("--untie-embeddings-and-output-weights",)
LATENT = (
    *"--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8".split(),
    *("--v-head-dim", "24", "--normalization", "RMSNorm", "--position-embedding-type", "rope"),
)
EXPERTS = (
    *("--num-experts", "4", "--moe-ffn-hidden-size", "32", "--moe-router-topk", "2", "--disable-bias-linear"),
    *("--moe-shared-expert-intermediate-size", "32", "--moe-token-dispatcher-type", "alltoall"),
    *("--swiglu", "--num-layers", "2"),
)
PREDICTION = ("--mtp-num-layers", "1", "--position-embedding-type", "rope")
MODELS = {"gqa": GQA, "untied gelu": UNTIED, "mla": LATENT, "experts": EXPERTS, "mtp": PREDICTION}
OF_ONE = {
    **MODELS,
    "fused attention": (*GQA, "--use-flash-attn"),
    "muon": (*GQA, "--ffn-hidden-size", "128", "--optimizer", "muon"),
    "full": (*GQA, *FULL),
    "selective": (*GQA, *SELECTIVE),
}
OF_TWO = {
    "tp2": (*GQA, *TP2),
    "tp2 full": (*GQA, *TP2, *FULL),
    "pp2 selective": (*GQA, *PP2, *SELECTIVE),
}
MORE_OF_TWO = {
    **{f"{name} tp2": (*flags, *TP2) for name, flags in MODELS.items() if name != "gqa"},
    # A stage that predicts further tokens has an output layer of its own.
    **{f"{name} pp2": (*flags, *PP2, *(UNTIED if name == "mtp" else ())) for name, flags in MODELS.items()},
    **{f"{name} full tp2": (*flags, *FULL, *TP2) for name, flags in MODELS.items() if name != "gqa"},
    "dp2": GQA,
    "dp2 experts": EXPERTS,
    "ep2 experts": (*EXPERTS, "--expert-model-parallel-size", "2"),
}


def counted(world_size, cases):
    lines = [("--global-batch-size", "2", *flags, *COUNT) for flags in cases.values()]
    ranks = run_world("profiled_run:train_each", world_size, lines, timeout=280)
    return dict(zip(cases, ranks[0]))


@pytest.fixture(scope="module")
def one():
    return counted(1, OF_ONE)


@pytest.fixture(scope="module")
def two():
    return counted(2, OF_TWO)


@pytest.fixture(scope="module")
def more():
    return counted(2, MORE_OF_TWO)


def operations(found):
    (seen,) = [step["operations"] for step in found["numbers"] if "operations" in step]
    return seen, found["formula"], found["samples"]


def check(found):
    seen, formula, samples = operations(found)
    assert seen["samples"] == samples
    assert seen["forward"] + seen["backward"] == formula.model * samples
    assert seen["recomputed"] == formula.recomputed * samples


@pytest.mark.parametrize("case", [case for case in OF_ONE if case != "fused attention"])
def test_one_process_executes_the_formula_exactly(one, case):
    check(one[case])


@pytest.mark.parametrize("case", OF_TWO)
def test_two_ranks_execute_the_formula_together(two, case):
    check(two[case])


@pytest.mark.thorough
@pytest.mark.parametrize("case", MORE_OF_TWO)
def test_every_model_executes_the_formula_in_every_layout(more, case):
    check(more[case])


def test_fused_attention_executes_seven_sixths_of_its_core(one):
    seen, formula, samples = operations(one["fused attention"])
    forward = formula.forward["attention scores"] * samples
    # Two products forward; five backward, one of which makes the scores once more.
    assert seen["forward"] == formula.model * samples / 3
    assert seen["backward"] == 2 * formula.model * samples / 3 + forward / 2
    assert seen["recomputed"] == 0
    core, more = 3 * forward, seen["forward"] + seen["backward"] - formula.model * samples
    assert 6 * (core + more) == 7 * core


def test_products_of_the_update_are_told_apart(one):
    # Query, key, value, projection, both layers of the MLP; five steps of two products with each, and one of
    # squares.
    shapes = ((64, 64), (32, 64), (32, 64), (64, 64), (64, 256), (64, 128))
    of_a_layer = sum(5 * (4 * r * r * c + 2 * r**3) for r, c in shapes)
    assert operations(one["muon"])[0]["update"] == LAYERS * of_a_layer
    assert operations(one["gqa"])[0]["update"] == 0


def test_figures_follow_from_counts_time_and_peak(one):
    last = one["full"]["numbers"][-1]
    assert last["mfu"] == last["model_tflops_per_device"]
    assert last["hfu"] == last["executed_tflops_per_device"] > last["counted_tflops_per_device"]
    # The formula counts the half of the scores that the mask leaves.
    assert last["counted_tflops_per_device"] > last["model_tflops_per_device"]


def test_counts_are_reported_once_and_the_counted_step_has_no_figure(one):
    first, second, third = one["gqa"]["numbers"]
    assert "model_tflops_per_device" in first
    assert "operations" not in first
    assert "hfu" not in first
    assert "operations" in second
    assert "hfu" not in second
    assert "operations" not in third
    assert "hfu" in third
