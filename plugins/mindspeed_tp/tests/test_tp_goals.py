"""Products in parts hide their communication, losses in parts keep few logits, reports make nobody wait."""

import sys
from pathlib import Path

import pytest
import torch

from mindspeed_testing import run_world

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from tp_exact import clocked_products, head_peaks, report_calls

PP2 = ("--pipeline-model-parallel-size", "2")


@pytest.fixture(scope="module")
def products():
    return run_world(clocked_products, 2)


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["gathered", "scattered", "summed"])
def test_a_product_in_parts_takes_little_longer_than_the_longer_of_product_and_communication(
    products, kind, parts
):
    for rank in products:
        found = rank[kind, parts]
        assert found.ratio <= 1 + 1 / parts + 1e-9
        assert found.ratio > 1
        assert found.hidden == parts - 1
        assert torch.equal(found.bits, rank[kind, 1].bits)


def test_logits_of_a_part_are_the_peak_of_a_loss_in_parts():
    ((whole, peaks),) = run_world(head_peaks, 1)
    besides = peaks[1] - whole
    for parts, peak in peaks.items():
        assert peak - besides == pytest.approx(whole / parts, rel=0.02)


def test_no_collective_of_reports_is_waited_for_before_the_end_of_the_update():
    plain = run_world(report_calls, 2, *PP2)
    ranks = run_world(report_calls, 2, *PP2, "--async-log-allreduce")
    for rank, other in zip(ranks, plain, strict=True):
        assert (rank["reports"], rank["waited"], rank["blocking reports"]) == (1, 0, 0)
        assert rank["blocking"] == other["blocking"] - (other["calls"] - rank["calls"] + 1)
        assert rank["blocking"] < other["blocking"]
        assert rank["loss"] == other["loss"]
