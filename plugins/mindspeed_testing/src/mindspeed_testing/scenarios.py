"""Every scenario of a plugin's features as parameters of one test."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest

from mindspeed_core.discovery.feature_checks import declared_features
from mindspeed_core.feature import Feature, Scenario


def scenario_parameters(
    declarations: Iterable[Any],
    *,
    platform: str = "",
    always: Collection[str] | None = None,
    first: int = 1,
    suits: Callable[[type[Feature], Scenario], bool] | None = None,
) -> list[Any]:
    """Return parameters ``(feature, scenario)`` of all features among ``declarations``.

    Use it so: ``@pytest.mark.parametrize(("feature", "scenario"), scenario_parameters(DECLARATIONS))`` over a
    test that asserts ``verify(feature, scenario).passed``.

    Args:
        declarations: what the plugin's entry point names.
        platform: leave out scenarios and features that do not apply to this platform; empty takes all.
        always: names of scenarios, or of one feature's (``"FEATURE-SCENARIO"``); all but these and each
            feature's first ones get the mark ``thorough``, so that a suite can leave them to a longer run
            (``-m "not thorough"``). None marks none.
        first: how many of each feature's scenarios, of those that are not left out, come along with them.
        suits: leave out the scenarios of which this is not true.

    Raises:
        ValueError: a feature carries no scenario at all.
    """
    found = []
    for feature in declared_features(declarations):
        if not feature.verify and not feature.trains_nothing:
            raise ValueError(
                f"feature {feature.name} carries no scenario; a feature without proof does not ship"
            )
        wanted = [
            scenario
            for scenario in feature.verify
            if (not platform or platform in (scenario.platforms or feature.platforms))
            and (suits is None or suits(feature, scenario))
        ]
        for index, scenario in enumerate(wanted):
            name = f"{feature.name}-{scenario.name}"
            chosen = always is None or index < first or bool({scenario.name, name} & {*always})
            marks = () if chosen else (pytest.mark.thorough,)
            found.append(pytest.param(feature, scenario, id=name, marks=marks))
    return found
