"""Dry runs of the proofs: bytes and calls are those of a world that computes."""

import pytest

from mindspeed_memory.features import DECLARATIONS
from mindspeed_testing.dry_run import verify_dry_run
from mindspeed_testing.scenarios import scenario_parameters

ALWAYS = ("recompute-activation-gelu",)


def planned(feature, scenario):
    """Leave out what needs values: how far they can be compressed, and checks of Megatron-FSDP."""
    return feature.fake_tensors and "--use-megatron-fsdp" not in scenario.flags


@pytest.mark.parametrize(
    ("feature", "scenario"), scenario_parameters(DECLARATIONS, always=ALWAYS, first=0, suits=planned)
)
def test_a_dry_run_of_a_proof_is_right(feature, scenario):
    verdict = verify_dry_run(feature, scenario)

    assert verdict.passed, verdict
