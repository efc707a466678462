"""The rows of the patch table that a session needs, by its features, platform and arguments."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

from mindspeed_core.feature import Patch
from mindspeed_megatron.hosts.megatron_lm.interception import ALWAYS, Interception
from mindspeed_megatron.hosts.megatron_lm.patch_table import ENTRIES, PATCHES
from mindspeed_megatron.hosts.megatron_lm.without_te import TE_AND_APEX, installed


def needed(
    stages: Collection[str],
    kinds: Collection[str],
    args: Any,
    *,
    any_feature: bool,
    without_te: bool,
    handed: Collection[str] = ("config",),
) -> tuple[Interception, ...]:
    """Return the patches that one session needs, at most one per target, in the order of the table.

    Args:
        stages: what active features implement.
        kinds: of the platform in use, see ``Platform.kinds``.
        args: the arguments of the run, None for a listing.
        any_feature: some feature is active.
        without_te: neither TransformerEngine nor Apex is installed.
        handed: arguments that the script's ``model_provider`` takes.
    """
    found: dict[str, Interception] = {}
    for row in PATCHES:
        asked_for = (
            not set(stages).isdisjoint(row.stages)
            or not set(kinds).isdisjoint(row.platforms)
            or row.platforms == ALWAYS
            or (row.elsewhere and set(kinds).isdisjoint(row.elsewhere))
            or (row.features and any_feature)
            or (row.without_te and without_te)
            or (row.models and all(getattr(args, name, None) for name in row.models))
            or any(getattr(args, name, None) for name in row.any_of)
        )
        if asked_for and row.unless not in stages and row.handed not in handed and _applies(row, args):
            found.setdefault(row.target, row)
    return tuple(found.values())


def _applies(row: Interception, args: Any) -> bool:
    if row.loaded and row.target.partition(":")[0] not in sys.modules:
        return False
    name, text = row.argument
    return not name or text in str(getattr(args, name, ""))


def patches_for(stages: Collection[str], kinds: Collection[str]) -> tuple[Patch, ...]:
    """Return the patches of a training with features that implement these stages, for listings."""
    rows = needed(stages, kinds, None, any_feature=bool(stages), without_te=not installed(TE_AND_APEX))
    return tuple(row.patch() for row in (*ENTRIES, *rows))
