"""Calls and bytes in the log are those that happen, and those that a dry run plans."""

import pytest

from mindspeed_profile.communication_count import largest, lines
from mindspeed_testing import run_world

TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2")
ZERO = ("--use-distributed-optimizer",)
LAYERS, MICROBATCHES, TOKENS, HIDDEN = 4, 4, 32, 64


CASES = {"tp2": TP2, "pp2": PP2, "zero": ZERO}
LINES = [(*flags, "--log-comm-bytes") for flags in CASES.values()]


def of_last_step(trainings):
    return {name: found["numbers"][-1]["communication"] for name, found in zip(CASES, trainings)}


@pytest.fixture(scope="module")
def two():
    return of_last_step(run_world("profiled_run:train_each", 2, LINES)[0])


@pytest.mark.parametrize("case", CASES)
def test_what_is_counted_is_what_a_dry_run_plans(two, case, planned):
    assert two[case] == planned[case]


@pytest.fixture(scope="module")
def planned():
    return of_last_step(run_world("profiled_run:plan_each", 1, LINES)[0])


def test_transfers_of_a_pipeline_are_one_tensor_for_each_micro_batch_and_direction(two):
    found = two["pp2"]["PIPELINE_MODEL_PARALLEL_GROUP"]
    calls = sum(one["calls"] for name, one in found.items() if name in ("isend", "send"))
    sent = sum(one["sent_bytes"] for name, one in found.items() if name in ("isend", "send"))
    assert calls == MICROBATCHES
    assert sent == MICROBATCHES * TOKENS * HIDDEN * 4


def test_sequence_parallelism_gathers_and_scatters_what_the_formula_says(two):
    found = two["tp2"]["TENSOR_MODEL_PARALLEL_GROUP"]
    # Two linears of each layer forward, and again for the gradient of their weights; two rows' gradients; the
    # head, which is parallel too, likewise.
    gathered = found["all_gather_into_tensor"]
    assert gathered["bytes"] == gathered["calls"] * TOKENS // 2 * HIDDEN * 4
    assert gathered["sent_bytes"] == gathered["bytes"]
    assert gathered["calls"] % MICROBATCHES == 0
    assert gathered["calls"] >= MICROBATCHES * LAYERS * 6


def test_the_distributed_optimizer_scatters_gradients_and_gathers_parameters(two):
    groups = {name: set(one) for name, one in two["zero"].items()}
    operations = set().union(*groups.values())
    assert {"reduce_scatter_tensor", "all_gather_into_tensor"} <= operations


def test_groups_of_one_rank_are_left_out(two):
    assert "TENSOR_MODEL_PARALLEL_GROUP" not in two["pp2"]
    assert "PIPELINE_MODEL_PARALLEL_GROUP" not in two["tp2"]


def test_the_rank_with_most_is_reported():
    key = ("TP", "all_reduce", "calls")
    assert largest([{key: 3.0}, {key: 5.0, ("PP", "send", "calls"): 1.0}, {}]) == {
        key: 5.0,
        ("PP", "send", "calls"): 1.0,
    }


def test_lines_name_group_operation_and_bytes():
    one = {"TP": {"all_reduce": {"calls": 2, "bytes": 2048, "sent_bytes": 2048.0}}}
    assert lines(one)[1].strip() == "TP all_reduce: 2 calls, 2,048 B given, 2,048 B sent"
    assert lines({}) == ["communication per step: none"]
