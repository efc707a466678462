"""Dry runs of the proofs of split sequences: bytes and calls are those of a world that computes."""

import pytest

from mindspeed_core.testing.dry_run import verify_dry_run
from mindspeed_core.testing.scenarios import scenario_parameters
from mindspeed_cp.features import DECLARATIONS

ALWAYS = ("context-parallel-ring",)
BY_DATA = {"--reset-attention-mask", "--reset-position-ids", "--variable-seq-lengths"}


def planned(feature, scenario):
    """Leave out what is not known without data: where documents end, and lengths that stages exchange."""
    return bool(feature.fake_tensors) and not BY_DATA.intersection(scenario.flags)


@pytest.mark.parametrize(
    ("feature", "scenario"), scenario_parameters(DECLARATIONS, always=ALWAYS, first=0, suits=planned)
)
def test_a_dry_run_of_a_proof_is_right(feature, scenario):
    verdict = verify_dry_run(feature, scenario)

    assert verdict.passed, verdict
