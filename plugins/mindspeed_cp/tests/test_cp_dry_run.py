"""Dry runs of the proofs of split sequences: bytes and calls are those of a world that computes."""

import pytest

from mindspeed_core.discovery.feature_checks import declared_features
from mindspeed_cp.features import DECLARATIONS
from mindspeed_testing.dry_run import verify_dry_run, why_not_dry
from mindspeed_testing.scenarios import scenario_parameters

ALWAYS = ("context-parallel-ring",)


def planned(feature, scenario):
    """Leave out what is not known without data: where documents end, and lengths that stages exchange."""
    return not why_not_dry(scenario)


@pytest.mark.parametrize(
    ("feature", "scenario"), scenario_parameters(DECLARATIONS, always=ALWAYS, first=0, suits=planned)
)
def test_a_dry_run_of_a_proof_is_right(feature, scenario):
    verdict = verify_dry_run(feature, scenario)

    assert verdict.passed, verdict


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("documents-ring", "--reset-attention-mask: documents end where the data says"),
        ("uneven-pp2", "--variable-seq-lengths: pipeline stages exchange lengths"),
        ("ring", ""),
    ],
)
def test_what_depends_on_data_is_left_out_with_its_reason(name, reason):
    scenarios = [scenario for feature in declared_features(DECLARATIONS) for scenario in feature.verify]
    found = why_not_dry(next(scenario for scenario in scenarios if scenario.name == name))
    assert found.startswith(reason)
    assert bool(found) == bool(reason)
