"""Look-up of the feature a user means: by its name or one of its flags, with suggestions for slips.

`show` and `verify` take feature names; shell completion offers them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from mindspeed_core.errors import UsageError, UserError

if TYPE_CHECKING:
    from mindspeed_core.registry import FeatureRecord, Registry


def find_feature(registry: Registry, wanted: str) -> FeatureRecord:
    """Return the installed feature of that name, or the one that owns that flag.

    Raises:
        UserError: there is none (with similar names), it is broken (with its error), or several own the flag.
    """
    if wanted in registry.features:
        return registry.features[wanted]
    owners = [
        record
        for record in registry.features.values()
        if any(wanted in flag.options for flag in record.cls.flags)
    ]
    if len(owners) == 1:
        return owners[0]
    if owners:
        names = ", ".join(record.cls.name for record in owners)
        raise UserError(f"{wanted} belongs to several features; name one of them: {names}")
    for broken in registry.broken:
        if wanted == broken.feature or wanted in broken.flags:
            raise UserError(f"{broken}\n    -> {broken.remedy}")
    from difflib import get_close_matches

    close = get_close_matches(wanted, list(registry.features), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else "mindspeed-features list shows what there is"
    raise UsageError(f"no feature {wanted!r} is installed; {hint}")


def complete_features(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the names of installed features, for shell completion."""
    from mindspeed_core.registry import Registry

    return [
        CompletionItem(name, help=record.cls.summary)
        for name, record in Registry.discover().features.items()
        if name.startswith(incomplete)
    ]
