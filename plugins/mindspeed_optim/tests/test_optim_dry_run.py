"""Dry runs of the proofs of update rules: bytes and calls are those of a world that computes."""

import pytest

from mindspeed_optim.features import DECLARATIONS
from mindspeed_testing.dry_run import verify_dry_run
from mindspeed_testing.scenarios import scenario_parameters

ALWAYS = ("opt-muon-dp2-distributed-optimizer",)


def planned(feature, scenario):
    """Leave Megatron-FSDP out, whose parts of parameters are checked by values."""
    return (feature.name, scenario.name) != ("opt-zero", "stage-3")


@pytest.mark.parametrize(
    ("feature", "scenario"), scenario_parameters(DECLARATIONS, always=ALWAYS, first=0, suits=planned)
)
def test_a_dry_run_of_a_proof_is_right(feature, scenario):
    verdict = verify_dry_run(feature, scenario)

    assert verdict.passed, verdict
