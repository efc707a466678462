"""Dry runs of the proofs of schedules: bytes and calls are those of a world that computes."""

import pytest

from mindspeed_pp.features import DECLARATIONS
from mindspeed_testing.dry_run import verify_dry_run
from mindspeed_testing.scenarios import scenario_parameters

ALWAYS = ("pp-engine-1f1b",)


@pytest.mark.parametrize(("feature", "scenario"), scenario_parameters(DECLARATIONS, always=ALWAYS, first=0))
def test_a_dry_run_of_a_proof_is_right(feature, scenario):
    verdict = verify_dry_run(feature, scenario)

    assert verdict.passed, verdict
