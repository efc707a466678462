"""Answers to flags and values that nobody here defines: whose they are, or what was meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from mindspeed_core.discovery.parts import part_if_installed
from mindspeed_core.feature import Flag
from mindspeed_core.flags.announced import choice_owners, flag_owners
from mindspeed_core.flags.notes import LEAVE_OUT
from mindspeed_core.flags.values import SHOWN, bad_value, shown_option
from mindspeed_core.resolver.plan import Problem

if TYPE_CHECKING:
    from mindspeed_core.registry import Registry

NO_SUCH_FLAG = "no such flag"


def unknown_flag(option: str, options: Iterable[str], registry: Registry | None, host: str) -> Problem:
    """Return the problem of an option string nobody defines: who owns it, or what was meant."""
    shown = shown_option(option)
    owner = flag_owners().get(option, "")
    refusal_of = part_if_installed("refusal_of_upstream_flag")
    refusal = None if refusal_of is None else refusal_of(option)
    absence = registry.why_absent(host, option) if registry is not None and host else ""
    if registry is not None:
        record = registry.broken_flags.get(option)
        if record is None and owner:
            record = next((b for b in registry.broken if _same(b.dist, owner)), None)
        if record is not None:
            return Problem("E-BROKEN-PLUGIN", str(record), record.remedy, feature=record.feature, flag=shown)
    if absence:
        return Problem("E-UNKNOWN-FLAG", absence, LEAVE_OUT, flag=shown)
    if refusal is not None:
        return Problem("E-UNKNOWN-FLAG", str(refusal), refusal.remedy, flag=shown)
    if registry is not None:
        version = next((v for d, v in registry.distributions().items() if _same(d, owner)), "")
        if owner and version:
            return Problem(
                "E-UNKNOWN-FLAG",
                f"the installed {owner} {version} does not have this flag",
                f"pip install --upgrade {owner}",
                flag=shown,
            )
    if owner:
        return Problem(
            "E-UNKNOWN-FLAG",
            f"belongs to {owner}, which is not installed",
            f"pip install {owner}",
            flag=shown,
        )
    candidates = {**dict.fromkeys(options), **flag_owners()}
    close = get_close_matches(option[:80], candidates, n=3, cutoff=0.6)
    remedies = [f"did you mean {' or '.join(close)}?"] if close else ["see --help"]
    if registry is not None:
        whole = [record for record in registry.broken if not record.feature]
        remedies += [f"it may belong to what cannot be loaded: {record}" for record in whole[:3]]
    return Problem("E-UNKNOWN-FLAG", NO_SUCH_FLAG, "; ".join(remedies), flag=shown)


def bad_choice(flag: Flag, option: str, value: Any, result: Any, registry: Registry | None) -> Problem:
    """Return the problem of a value that is none of a flag's choices; ``result`` is it in the flag's type."""
    broken = registry.broken_flags.get(option) if registry is not None else None
    choices = [str(choice) for choice in flag.choices]
    close = get_close_matches(str(result)[:SHOWN], choices, n=1, cutoff=0.7)
    reason = f"not one of {', '.join(choices)}"
    remedy = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(choices)}"
    owner = choice_owners().get(f"{flag.name} {result}") if isinstance(result, str) else None
    if owner is not None:
        remedy = f"pip install {owner}, which adds it"
    if broken is not None:
        remedy += f"; if the value belongs to {broken.feature}: {broken}"
    return bad_value(option, value, reason, remedy)


def _same(dist: str, other: str) -> bool:
    return bool(dist) and dist.lower().replace("_", "-") == other.lower().replace("_", "-")
