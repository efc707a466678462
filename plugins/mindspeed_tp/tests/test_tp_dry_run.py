"""Dry runs of the proofs: bytes and calls are those of a world that computes."""

import pytest

from mindspeed_testing.dry_run import verify_dry_run
from mindspeed_testing.scenarios import scenario_parameters
from mindspeed_tp.features import DECLARATIONS

ALWAYS = ("tp-2d-1x2", "recompute-comm-level2-sp")


def planned(feature, scenario):
    """Leave out what a dry run does not have: HCCL."""
    return "cpu" in feature.platforms


@pytest.mark.parametrize(
    ("feature", "scenario"), scenario_parameters(DECLARATIONS, always=ALWAYS, first=0, suits=planned)
)
def test_a_dry_run_of_a_proof_is_right(feature, scenario):
    verdict = verify_dry_run(feature, scenario)

    assert verdict.passed, verdict
