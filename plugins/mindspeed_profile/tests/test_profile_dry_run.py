"""Dry runs of the proofs of the profiler: bytes and calls are those of a world that computes."""

import pytest

from mindspeed_core.feature import Feature
from mindspeed_core.testing.dry_run import verify_dry_run
from mindspeed_profile.features import DECLARATIONS

ALWAYS = ("profile/single",)
PROOFS = {
    f"{feature.name}/{scenario.name}": (feature, scenario)
    for feature in DECLARATIONS
    if isinstance(feature, type) and issubclass(feature, Feature)
    for scenario in feature.verify
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.thorough) for name in PROOFS]
)
def test_a_dry_run_of_a_proof_is_right(name):
    verdict = verify_dry_run(*PROOFS[name])

    assert verdict.passed, verdict
