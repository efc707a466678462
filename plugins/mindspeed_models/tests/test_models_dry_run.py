"""Dry runs of adapters: bytes and calls are those of a world that computes, also on the NPU's stand-in."""

import pytest

from mindspeed_models.features.lora import Lora
from mindspeed_models.features.lora_proofs import ALL, PLAIN
from mindspeed_testing.dry_run import measure_world, verify_dry_run, why_not_dry
from mindspeed_testing.scenarios import scenario_parameters


def planned(feature, scenario):
    """Leave out what is not known without data."""
    return not why_not_dry(scenario)


@pytest.mark.parametrize(
    ("feature", "scenario"), scenario_parameters((Lora,), always=(), first=0, suits=planned)
)
def test_a_dry_run_of_a_proof_is_right(feature, scenario):
    verdict = verify_dry_run(feature, scenario)

    assert verdict.passed, verdict


def test_a_dry_run_looks_for_no_values_in_gradients():
    assert len(measure_world((*PLAIN, *ALL), 1, platform="fake")) == 1
