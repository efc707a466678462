"""Every scenario of a plugin's features as parameters of one test."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from mindspeed_core.feature import Feature


def scenario_parameters(
    declarations: Iterable[Any], *, platform: str = "", always: Collection[str] | None = None
) -> list[Any]:
    """Return parameters ``(feature, scenario)`` of all features among ``declarations``.

    Use it so: ``@pytest.mark.parametrize(("feature", "scenario"), scenario_parameters(DECLARATIONS))`` over a
    test that asserts ``verify(feature, scenario).passed``.

    Args:
        declarations: what the plugin's entry point names.
        platform: leave out scenarios and features that do not apply to this platform; empty takes all.
        always: names of scenarios, or of one feature's (``"FEATURE-SCENARIO"``); all but these and each
            feature's first one get the mark ``thorough``, so that a suite can leave them to a longer run
            (``-m "not thorough"``). None marks none.

    Raises:
        ValueError: a feature carries no scenario at all.
    """
    found = []
    for feature in declarations:
        if not (isinstance(feature, type) and issubclass(feature, Feature)):
            continue
        if not feature.verify:
            raise ValueError(
                f"feature {feature.name} carries no scenario; a feature without proof does not ship"
            )
        for scenario in feature.verify:
            if platform and platform not in (scenario.platforms or feature.platforms):
                continue
            name = f"{feature.name}-{scenario.name}"
            chosen = always is None or bool({scenario.name, name} & {*always})
            marks = () if chosen or scenario is feature.verify[0] else (pytest.mark.thorough,)
            found.append(pytest.param(feature, scenario, id=name, marks=marks))
    return found
