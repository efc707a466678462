"""Dry runs of the proofs of split sequences: bytes and calls are those of a world that computes."""

import pytest

from mindspeed_core.feature import Feature
from mindspeed_core.testing.dry_run import verify_dry_run
from mindspeed_cp.features import DECLARATIONS

ALWAYS = ("context-parallel/ring",)
_DOCUMENTS = {"--reset-attention-mask", "--reset-position-ids"}
PROOFS = {
    f"{feature.name}/{scenario.name}": (feature, scenario)
    for feature in DECLARATIONS
    if isinstance(feature, type) and issubclass(feature, Feature)
    for scenario in feature.verify
    # Where documents end is not known without data.
    if feature.fake_tensors and not _DOCUMENTS.intersection(scenario.flags)
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.thorough) for name in PROOFS]
)
def test_a_dry_run_of_a_proof_is_right(name):
    verdict = verify_dry_run(*PROOFS[name])

    assert verdict.passed, verdict
