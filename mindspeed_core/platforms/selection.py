"""Selection of a run's platform: the one asked for, or the best one that is available here.

Torch-free, so that a plan can be printed on any machine; opening a session verifies the choice for real.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import ArgumentError, UserError
from mindspeed_core.feature import dest_of
from mindspeed_core.platforms.platform import Availability, Platform

if TYPE_CHECKING:
    from mindspeed_core.registry import Registry

AUTO = "auto"
_FAKE_OF = {"auto": "fake", "cpu": "fake", "cuda": "fake-cuda", "npu": "fake-npu"}
_DRY_RUN_FLAGS = ("--fake-world-size", "--fake-rank", "--plan-skew")


def requested_platform(args: Any) -> str:
    """Return what ``--platform`` asks for; with ``--fake-process-group`` the dry run of it.

    Args:
        args: parsed arguments; one that lacks a flag has its default.

    Raises:
        ArgumentError: there is no dry run of the platform.
    """
    asked = str(getattr(args, "platform", AUTO))
    if not getattr(args, "fake_process_group", False) or asked in _FAKE_OF.values():
        return asked
    if asked not in _FAKE_OF:
        reason = f"there is no dry run of --platform {asked}"
        raise ArgumentError("--fake-process-group", None, reason, "use --platform fake")
    return _FAKE_OF[asked]


def check_dry_run_flags(platform: type[Platform], args: Any) -> None:
    """Refuse flags of dry runs on a platform that computes.

    Raises:
        ArgumentError: names the first of them.
    """
    if platform.dry_run:
        return
    for flag in _DRY_RUN_FLAGS:
        value = getattr(args, dest_of(flag), None)
        if value is not None:
            reason = f"belongs to dry runs, and --platform is {platform.name}"
            raise ArgumentError(flag, value, reason, "add --platform fake, or drop the flag")


def choose_platform(requested: str, registry: Registry) -> tuple[str, str]:
    """Choose the requested platform; for ``auto`` the available one with the highest preference.

    Returns:
        Its name, and one sentence that says why.

    Raises:
        UserError: the requested platform is unknown or not available, or none is.
    """
    if requested != AUTO:
        availability = registry.platform(requested).probe()
        if not availability.available:
            remedy = f"use --platform auto, or one of these: {_others(requested, registry)}"
            raise ArgumentError("--platform", requested, availability.reason, remedy)
        return requested, f"platform {requested}: asked for ({availability.reason})"
    refused: list[str] = []
    candidates: list[tuple[int, str, type[Platform]]] = []
    for name in registry.platform_names():
        try:
            platform = registry.platform(name)
        except UserError as error:
            refused.append(f"{name} cannot be loaded: {error}")
            continue
        if platform.dry_run:
            continue
        candidates.append((-platform.preference, name, platform))
    for _, name, platform in sorted(candidates, key=lambda candidate: candidate[:2]):
        availability = platform.probe()
        if availability.available:
            passed_over = f"; {', '.join(refused)}" if refused else ""
            return name, f"platform {name}: {availability.reason}{passed_over}"
        refused.append(f"not {name}: {availability.reason}")
    raise UserError("--platform auto: no platform is available (" + "; ".join(refused) + ")")


def _others(requested: str, registry: Registry) -> str:
    """Name the platforms that could be used instead."""
    usable = []
    for name in registry.platform_names():
        if name == requested:
            continue
        try:
            availability: Availability = registry.platform(name).probe()
        except UserError:
            continue
        if availability.available:
            usable.append(name)
    return ", ".join(usable) or "none is available here"


def kinds_of(registry: Registry, platform: str) -> tuple[frozenset[str], str]:
    """Return the names under which features may list a platform, and the one that their requirements test."""
    try:
        platform_class = registry.platform(platform)
    except UserError:
        # A plan can be made for a platform that is not installed here.
        return frozenset({platform}), platform
    return platform_class.kinds() | {platform}, platform_class.like or platform
