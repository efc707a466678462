"""Differences between two versions of megatron-core at the touch points."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mindspeed_megatron.touch_points.record import Symbols
from mindspeed_megatron.touch_points.sources import CLASS, FOREIGN, FUNCTION, Symbol
from mindspeed_megatron.touch_points.uses import CallShape, Use

SHOWN = 8
"""Changes that a short message lists."""


@dataclass(frozen=True)
class Change:
    """A touch point that a version has otherwise than the one it is compared with.

    Attributes:
        point: dotted name.
        difference: the difference, a phrase after the name.
        modules: the modules of ours, or of a plugin, that it concerns.
        breaks: what uses it fails; otherwise something changed that these modules replace.
        of_source: nothing but the source changed.
    """

    point: str
    difference: str
    modules: tuple[str, ...]
    breaks: bool
    of_source: bool = False

    def __str__(self) -> str:
        """Return the change as it is printed."""
        return f"{self.point.removeprefix('megatron.core.')} {self.difference}"


def listed(changes: Sequence[Change], *, everything: bool = False) -> str:
    """Return ``: first; second; …``, of many the tail as a number; empty where nothing changed."""
    told = [str(change) for change in changes]
    if len(told) > SHOWN and not everything:
        told = [*told[:SHOWN], f"{len(told) - SHOWN} more"]
    return ": " + "; ".join(told) if told else ""


def changes(
    uses: Mapping[str, Use], before: Mapping[str, Symbol], now: Symbols, unrecorded: Collection[str] = ()
) -> list[Change]:
    """Return what differs, in order of names.

    Of a class that is gone its members are not counted again.

    Args:
        uses: what sources do with each point.
        before: the recorded version; what it lacks already is known, and no change.
        now: the version in question.
        unrecorded: points that no record has, those of other people's plugins: they have to be there.
    """
    found: list[Change] = []
    gone: set[str] = set()
    for point in sorted(uses):
        if any(point.startswith(parent + ".") for parent in gone):
            continue
        use, symbol, then = uses[point], now(point), before.get(point)
        if symbol is None:
            gone.add(point)
            if then is not None or (point in unrecorded and not use.optional):
                found.append(Change(point, "is gone", tuple(sorted(use.modules)), not use.optional))
            continue
        if then is not None and symbol.kind != then.kind:
            gone.add(point)
        found += _differences(point, use, symbol, then)
    return found


def _differences(point: str, use: Use, symbol: Symbol, then: Symbol | None) -> Iterator[Change]:
    users = tuple(sorted(use.modules))
    if then is not None and symbol.kind != then.kind and {symbol.kind, then.kind} & {CLASS, FUNCTION}:
        if symbol.kind == FOREIGN:
            yield Change(point, "is not megatron-core's own any more", users, not use.optional)
        else:
            yield Change(point, f"is a {symbol.kind} and was a {then.kind}", users, True)
        return
    for call in sorted(use.calls):
        refused = refusal(symbol, call)
        if refused and not (then is not None and refusal(then, call)):
            yield Change(point, refused, users, True)
            return
    if then is None or not use.replaced:
        return
    replacing = tuple(sorted(use.replaced))
    if symbol.parameters != then.parameters:
        yield Change(
            point, _other_parameters(symbol.parameters or (), then.parameters or ()), replacing, False
        )
    elif symbol.kind != CLASS and symbol.digest != then.digest:
        yield Change(point, "has another source", replacing, False, of_source=True)


def refusal(symbol: Symbol, call: CallShape) -> str:
    """Return why a symbol does not take a call; empty where it does, or where its parameters are unknown."""
    parameters = symbol.parameters
    if parameters is None:
        return ""
    if symbol.is_method:
        parameters = parameters[1:]
    placed: list[str] = []
    named: set[str] = set()
    demanded: list[str] = []
    open_by_place = open_by_name = only_names = False
    for item in parameters:
        if item == "/":
            continue
        if item.startswith("**"):
            open_by_name = True
        elif item.startswith("*"):
            only_names = True
            open_by_place = open_by_place or len(item) > 1
        else:
            name = item.rstrip("=")
            named.add(name)
            if not only_names:
                placed.append(name)
            if not item.endswith("="):
                demanded.append(name)
    unknown = [name for name in call.keywords if name not in named]
    if unknown and not open_by_name:
        return f"takes no {', '.join(unknown)}"
    if call.positional > len(placed) and not open_by_place:
        return f"takes {len(placed)} arguments by position, not {call.positional}"
    given = {*placed[: call.positional], *call.keywords}
    missing = [name for name in demanded if name not in given]
    if call.exact and missing:
        return f"asks for {', '.join(missing)}"
    return ""


def _other_parameters(now: tuple[str, ...], then: tuple[str, ...]) -> str:
    names = {item.rstrip("=") for item in now}
    earlier = {item.rstrip("="): None for item in then}
    new = [item.rstrip("=") for item in now if item.rstrip("=") not in earlier]
    gone = [name for name in earlier if name not in names]
    told = [f"takes {', '.join(new)} too"] if new else []
    told += [f"takes no {', '.join(gone)} any more"] if gone else []
    return " and ".join(told) or "takes its arguments in another form"
