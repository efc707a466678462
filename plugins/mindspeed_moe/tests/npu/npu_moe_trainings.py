"""Trainings with experts on value devices: equal to the CPU, update included."""

from __future__ import annotations

import pytest

from mindspeed_core.feature import Scenario
from mindspeed_moe.features import DECLARATIONS
from mindspeed_moe.features.fused_products_proofs import PLACES, ROWS
from mindspeed_moe.features.proofs import MODEL, SHARED
from mindspeed_testing.npu import ScenarioWorlds, assert_equals_cpu, device_scenarios
from mindspeed_testing.npu.kernels.contract import SOCS

QUICK = ("moe-alltoall-overlap-ep2", "moe-allgather-overlap-ep2")
ONE_BY_ONE = ("moe-pipe-experts",)
"""Features that multiply one expert's tokens while another's travel, so that no product is of groups."""
TRAININGS = device_scenarios(DECLARATIONS, always=QUICK)
FOUR = (
    *(*MODEL, *SHARED, "--expert-model-parallel-size", "4", "--num-experts", "8", "--bf16"),
    *("--moe-router-dtype", "fp32"),
)


@pytest.fixture(scope="module")
def trained(asked_for):
    return ScenarioWorlds(asked_for("scenario"))


@pytest.mark.parametrize(("feature", "scenario"), TRAININGS)
def test_overlapped_experts_train_as_the_cpu(feature, scenario, trained):
    training = trained.assert_equals_cpu(scenario)
    assert feature in training.side.features
    grouped = "--moe-grouped-gemm" in scenario.flags and not {*PLACES} & {*scenario.flags}
    if grouped and feature not in ONE_BY_ONE:
        assert training.count("npu_grouped_matmul")


@pytest.mark.thorough
@pytest.mark.parametrize("soc", [soc for soc in SOCS if soc != "910B"])
@pytest.mark.parametrize(("feature", "scenario"), [param for param in TRAININGS if not param.marks])
def test_overlapped_experts_train_as_the_cpu_on_other_generations(feature, scenario, soc):
    training = assert_equals_cpu(scenario, soc=soc)
    assert feature in training.side.features


def test_products_exchange_rows_by_kernels_where_these_take_as_many_ranks():
    scenario = Scenario("four", flags=(*FOUR, *ROWS), baseline=FOUR, world_size=4, tolerance=2e-2)
    training = assert_equals_cpu(scenario, soc="950")
    # Each is the other's gradient.
    assert training.count("npu_alltoallv_gmm")
    assert training.count("npu_gmm_alltoallv")
    assert "moe-mc2" in training.side.features
