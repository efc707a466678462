"""Dry runs of the proofs: bytes and calls are those of a world that computes."""

import pytest

from mindspeed_core.testing.dry_run import verify_dry_run, why_not_dry
from mindspeed_core.testing.scenarios import scenario_parameters
from mindspeed_memory.features import DECLARATIONS

ALWAYS = ("recompute-activation-gelu",)


def planned(feature, scenario):
    """Leave out what is not known without values: how far they can be compressed, for instance."""
    return not why_not_dry(scenario)


@pytest.mark.parametrize(
    ("feature", "scenario"), scenario_parameters(DECLARATIONS, always=ALWAYS, first=0, suits=planned)
)
def test_a_dry_run_of_a_proof_is_right(feature, scenario):
    verdict = verify_dry_run(feature, scenario)

    assert verdict.passed, verdict
