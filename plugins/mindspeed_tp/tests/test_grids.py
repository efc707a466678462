"""Grids beyond the proofs of 2D: every shape, each policy alone, a pipeline, one grid after another."""

import pytest

from mindspeed_core.feature import Resume, Scenario
from mindspeed_testing.dry_run import verify_dry_run
from mindspeed_testing.verify import verify
from mindspeed_tp.features.grid import TwoDimensional
from mindspeed_tp.features.grid_proofs import LEVEL2, grid, on_one
from mindspeed_tp.features.proofs import BOTH_OVERLAPS, COC, FULL, MODEL, PLAIN, PP2, SHARDED, SP

pytestmark = pytest.mark.thorough
CASES = (
    on_one("2x1", 2, 1, *SP),
    on_one("4x1", 4, 1),
    on_one("1x4", 1, 4),
    on_one("query-norm", 2, 2, both=("--qk-layernorm",)),
    on_one("pp2", 1, 2, *PP2, more=2),
    on_one("recompute-full", 2, 2, *FULL),
    on_one("recompute-comm", 2, 2, *LEVEL2),
    on_one("recompute-comm-biases", 2, 2, *LEVEL2, model=PLAIN),
    on_one("in-parts", 2, 2, *COC, "2"),
    on_one("fused-kernels", 2, 2, "--use-ascend-mc2"),
    Scenario(
        "resume-on-another-grid",
        flags=(*MODEL, *grid(2, 2), *BOTH_OVERLAPS),
        world_size=4,
        tolerance=1e-5,
        resume=Resume(flags=(*MODEL, *grid(1, 2), *SHARDED), world_size=4),
    ),
)


@pytest.mark.parametrize("scenario", CASES, ids=lambda scenario: scenario.name)
def test_a_grid_trains_as_one_process(scenario):
    verdict = verify(TwoDimensional, scenario, platform="cpu")

    assert verdict.passed, str(verdict)


@pytest.mark.parametrize(
    "scenario", [case for case in CASES if case.resume is None], ids=lambda scenario: scenario.name
)
def test_a_dry_run_of_a_grid_is_right(scenario):
    verdict = verify_dry_run(TwoDimensional, scenario)

    assert verdict.passed, verdict
