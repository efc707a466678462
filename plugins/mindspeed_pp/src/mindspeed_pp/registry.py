"""The schedules there are, built in or from other packages."""

from __future__ import annotations

from mindspeed_core.discovery.extensions import installed_extensions
from mindspeed_pp.extension_points import SCHEDULES
from mindspeed_pp.rule import Rule
from mindspeed_pp.schedules import BUILT_IN


def rules() -> dict[str, Rule]:
    """Return every installed schedule by name: the built-in ones first, then those of other packages."""
    found = {rule.name: rule for rule in BUILT_IN}
    contributed = installed_extensions(SCHEDULES).sound()
    return found | {name: rule for name, rule in contributed.items() if name not in found}


def rule_named(name: str) -> Rule:
    """Return an installed schedule; other packages are looked at only where it is not built in.

    Raises:
        UserError: there is none of this name, or its package is broken.
    """
    for rule in BUILT_IN:
        if rule.name == name:
            return rule
    found: Rule = installed_extensions(SCHEDULES).get(name)
    return found
