"""Scenarios of features that two value devices can train, as parameters of one test."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import pytest

from mindspeed_core.feature import Feature, Scenario
from mindspeed_testing.scenarios import scenario_parameters

MOST_RANKS = 2
"""Ranks of a world in which kernels are computed in float64 within the time of a test."""
STEPS = 2
"""Steps of an ordinary run: gradients before and behind an update, and what two updates leave."""


def device_scenarios(
    declarations: Iterable[Any], *, always: Collection[str] = (), first: int = 0
) -> list[Any]:
    """Return parameters ``(feature's name, scenario)``, without larger worlds and without checkpoints.

    Parametrize ``("feature", "scenario")`` of a test with them that calls ``assert_equals_cpu(scenario)``.

    Args:
        declarations: what the plugin's entry point names.
        always: names of scenarios, or of one feature's (``"FEATURE-SCENARIO"``).
        first: how many of each feature's come along with them; all others get the mark ``thorough``. Those
            without it train `STEPS` steps, the others as many as their proofs.
    """
    found = scenario_parameters(declarations, always=always, first=first, suits=_small)
    return [
        pytest.param(
            feature.name,
            scenario if parameter.marks else replace(scenario, steps=min(STEPS, scenario.steps)),
            id=parameter.id,
            marks=parameter.marks,
        )
        for parameter in found
        for feature, scenario in [parameter.values]
    ]


def _small(feature: type[Feature], scenario: Scenario) -> bool:
    return scenario.world_size <= MOST_RANKS and scenario.resume is None
