"""State of features on this machine, and the colours in which `list` and `show` print it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_core.errors import UserError

if TYPE_CHECKING:
    from mindspeed_core.feature import Feature
    from mindspeed_core.registry import Registry
    from mindspeed_core.resolver.feature_state import FeatureState

STATE_STYLES = {"ok": "good", "falls back": "warning", "left out": "dim", "needs": "bad"}


def platform_here(registry: Registry, requested: str | None) -> str:
    """Return the requested platform, or the best one of this machine; ``none`` where there is none.

    Raises:
        UserError: the requested platform cannot be used.
    """
    from mindspeed_core.platforms.selection import choose_platform

    try:
        return choose_platform(requested or "auto", registry)[0]
    except UserError:
        if requested is not None:
            raise
        # A list is wanted most where something is wrong.
        return "none"


def state_here(registry: Registry, feature: type[Feature], requested: str | None) -> tuple[str, FeatureState]:
    """Return the platform of this machine and the state of a feature on it."""
    from mindspeed_core.resolver.feature_state import feature_state

    chosen = platform_here(registry, requested)
    return chosen, feature_state(feature, registry, chosen)
