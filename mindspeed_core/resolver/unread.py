"""Flags that were given and that nothing reads: each is noted, or refused where it decides what is trained.

A flag of the core or of a host is read by it. A flag of features is read by those that declare it, while they
are active, but for what `Feature.unread` takes out. A value that is the flag's default asks for nothing.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mindspeed_core.feature import Flag
from mindspeed_core.flags.values import shown_value
from mindspeed_core.resolver.plan import Problem, Unread
from mindspeed_core.resolver.remedies import to_ask_for
from mindspeed_core.resolver.request import Request
from mindspeed_core.resolver.selection import Selection

_NAMED = 4


def check_unread(request: Request, selection: Selection, active: Sequence[str]) -> tuple[Unread, ...]:
    """Return the given flags that nothing reads; report those that decide what is trained as problems.

    Flags of a feature that a problem was found with are left out: the problem says more.
    """
    reported = []
    exceptions: dict[str, Mapping[str, str]] = {}
    reading = {*active, *selection.taken}
    for dest, option in _given(request):
        declaring = request.index.readers[dest]
        if any(name in selection.failed for name in declaring):
            continue
        flag = request.index.flags[option]
        readers = [name for name in declaring if name in reading]
        off = [name for name in declaring if name not in selection.held]
        if not readers and _switches_off(request, dest, off):
            continue
        unread = (
            _excepted(request, flag, readers, exceptions)
            if readers
            else _without_reader(request, selection, flag, declaring)
        )
        if unread is None:
            continue
        reason, remedy, feature, held = unread
        value = getattr(request.args, dest, None)
        shown = "" if flag.is_switch else shown_value(value)
        if flag.changes_training and not held:
            way = f"{remedy}, or drop {option}" if remedy else f"drop {option}"
            reason_text = f"nothing reads it: {reason}"
            request.problems.append(Problem("E-UNREAD", reason_text, way, feature, option, shown))
            continue
        reported.append(Unread(option, reason, remedy, feature, shown, held_back=held))
    return tuple(reported)


def _given(request: Request) -> Iterator[tuple[str, str]]:
    """Yield destination and option string of each given flag of a feature, defaults left out."""
    args, index, provenance = request.args, request.index, request.provenance
    for dest, default in index.unshared.items():
        if provenance is None:
            option = index.first_option[dest]
        else:
            source = provenance.get(dest, "default")
            # Most flags are not given: one comparison each.
            if source == "default" or not source.startswith("flag "):
                continue
            option = source.removeprefix("flag ")
            if option not in index.flags:
                option = index.first_option[dest]
        if _plain(getattr(args, dest, default)) != _plain(default):
            yield dest, option


def _switches_off(request: Request, dest: str, declaring: Iterable[str]) -> bool:
    """Return whether a feature that declares a flag would be active without it: the flag turned it off."""
    without = Namespace(**{**vars(request.args), dest: request.index.unshared[dest]})
    for name in declaring:
        try:
            if request.index.classes[name].enabled(without):
                return True
        except (Exception, SystemExit):
            continue
    return False


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _excepted(
    request: Request, flag: Flag, readers: Iterable[str], exceptions: dict[str, Mapping[str, str]]
) -> tuple[str, str, str, bool] | None:
    """Return why none of the active features that declare a flag reads it; None where one does."""
    first: tuple[str, str, str, bool] | None = None
    for name in readers:
        if name not in request.index.with_unread:
            return None
        if name not in exceptions:
            exceptions[name] = _asked(request, name)
        reason = next((exceptions[name][o] for o in flag.options if o in exceptions[name]), "")
        if not reason:
            return None
        first = first or (reason, "", name, False)
    return first


def _asked(request: Request, name: str) -> Mapping[str, str]:
    try:
        return dict(request.index.classes[name].unread(request.args))
    except (Exception, SystemExit):
        # A note that cannot be made is no reason to stop a training; the contract reports it.
        return {}


def _without_reader(
    request: Request, selection: Selection, flag: Flag, declaring: Sequence[str]
) -> tuple[str, str, str, bool]:
    held = next((selection.held[name] for name in declaring if name in selection.held), None)
    if held is not None:
        return f"{held.name} is held back: {held.reason}", "", held.name, True
    names = ", ".join(declaring[:_NAMED]) + (", …" if len(declaring) > _NAMED else "")
    which = f"{names} is not" if len(declaring) == 1 else f"none of {names} is"
    ways = [to_ask_for(request.index.classes[name], request.args, flag) for name in declaring[:_NAMED]]
    remedy = ", or ".join(dict.fromkeys(way for way in ways if way))
    return f"{which} active", remedy, declaring[0], False
