"""State of features on a platform before any flag is given: ok, falls back, left out, or needs something.

The same facts hold a requested feature back, or refuse it, when a plan is made. Torch-free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mindspeed_core.errors import UserError
from mindspeed_core.platforms.selection import choose_platform, kinds_of
from mindspeed_core.resolver.requirements import unmet

if TYPE_CHECKING:
    from mindspeed_core.feature import Feature
    from mindspeed_core.registry import Registry

OK, FALLS_BACK, LEFT_OUT, NEEDS = "ok", "falls back", "left out", "needs"
STATE_STYLES = {OK: "good", FALLS_BACK: "warning", LEFT_OUT: "dim", NEEDS: "bad"}
"""The style of `mindspeed_core.terminal.listing` in which a state is printed."""


class FeatureState(NamedTuple):
    """State of one feature on one platform.

    Attributes:
        state: ``ok``, ``falls back``, ``left out`` (it has nothing to do there) or ``needs``.
        needs: what is missing, for ``needs``; the feature that takes over, for ``falls back``.
        reason: one sentence; empty for ``ok``.
        remedy: what to do; empty where nothing needs doing.
    """

    state: str = OK
    needs: str = ""
    reason: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        """Return a few words for a list."""
        return f"{self.state} {self.needs}" if self.state == NEEDS else self.state


def feature_state(feature: type[Feature], registry: Registry, platform: str) -> FeatureState:
    """Return the state of an installed feature on a platform.

    Args:
        feature: its declaration.
        registry: what is installed.
        platform: name of an installed platform.
    """
    kinds, kind = kinds_of(registry, platform)
    if not kinds & {*feature.platforms}:
        supported = " or ".join(feature.platforms) or "another platform"
        if feature.fallback is None:
            reason = f"it does not run on platform {platform}"
            return FeatureState(NEEDS, supported, reason, f"use --platform {supported}")
        taken = feature.fallback.feature
        return FeatureState(FALLS_BACK if taken else LEFT_OUT, taken, feature.fallback.reason)
    for package in feature.packages:
        problem = unmet(package, kind)
        if problem is not None:
            wanted = package.partition(";")[0].strip()
            return FeatureState(NEEDS, wanted, *problem)
    for requirement in feature.requires:
        names = (requirement.feature, *requirement.any_of) if not requirement.flag else ()
        wanted_names = [name for name in names if name]
        if wanted_names and not any(name in registry.features for name in wanted_names):
            missing = " or ".join(wanted_names)
            return FeatureState(NEEDS, missing, f"needs {missing}, which is not installed")
    return FeatureState()


def platform_here(registry: Registry, requested: str | None) -> str:
    """Return the requested platform, or the best one of this machine; ``none`` where there is none.

    Raises:
        UserError: the requested platform cannot be used.
    """
    try:
        return choose_platform(requested or "auto", registry)[0]
    except UserError:
        if requested is not None:
            raise
        # A list is wanted most where something is wrong.
        return "none"


def state_here(registry: Registry, feature: type[Feature], requested: str | None) -> tuple[str, FeatureState]:
    """Return the platform of this machine and the state of a feature on it."""
    chosen = platform_here(registry, requested)
    return chosen, feature_state(feature, registry, chosen)
