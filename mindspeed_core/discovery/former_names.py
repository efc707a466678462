"""Plugins that use former names of stages and arguments, brought to the present ones.

Within one major version of the hook interface a rename keeps older plugins working. The registry hands out a
subclass of such a feature that has the present names, so that nothing else in the core knows former ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

from mindspeed_core.discovery.stages import Stage, wanted_arguments
from mindspeed_core.feature import PROJECT, Feature

_MARK = PROJECT + "_impl"


def presently(feature: type[Feature], stages: Mapping[str, Stage]) -> tuple[type[Feature], tuple[str, ...]]:
    """A feature with the present names of stages and arguments, and what it should be changed to.

    Args:
        feature: a declaration that is sound by itself.
        stages: every stage by its present name.

    Returns:
        The feature itself where it uses no former name, otherwise a subclass; and one sentence for each
        change that concerns it, also for what still has its name but is going to go.
    """
    former = {
        change.was: (stage, change)
        for stage in stages.values()
        for change in stage.changes
        if change.was and not change.argument
    }
    notices: list[str] = []
    replaced: dict[str, Any] = {}
    for name, function in feature.hooks().items():
        stage = stages.get(name)
        if stage is None and name in former:
            stage, change = former[name]
            notices.append(change.told(stage.name))
            replaced[name] = _copy(function, ())
            replaced[stage.name] = _copy(function, (), marked=True)
            function = replaced[stage.name]
        if stage is None or not stage.changes:
            continue
        renames = _argument_changes(stage, function, notices)
        if renames:
            replaced[stage.name] = _copy(function, renames, marked=True)
    if not replaced:
        return feature, tuple(notices)
    body = {**replaced, "__module__": feature.__module__, "__doc__": feature.__doc__}
    return type(feature.__name__, (feature,), body), tuple(notices)


def _argument_changes(
    stage: Stage, function: Callable[..., Any], notices: list[str]
) -> list[tuple[str, str]]:
    """The renames ``(former, present)`` that an implementation needs; notices of all changes it meets."""
    try:
        wanted = wanted_arguments(function)
    except (TypeError, ValueError):
        # The check of signatures reports it.
        return []
    renames = []
    for change in stage.changes:
        if change.was and change.argument and change.was in wanted:
            renames.append((change.was, change.argument))
            notices.append(change.told(stage.name))
        elif change.instead and (not change.argument or change.argument in wanted):
            notices.append(change.told(stage.name))
    return renames


def _copy(
    function: Callable[..., Any], renames: Sequence[tuple[str, str]], *, marked: bool = False
) -> Callable[..., Any]:
    """A function that does the same and whose parameters appear under their present names.

    Args:
        function: the implementation.
        renames: pairs of former and present name.
        marked: it is an implementation too; otherwise only a method that others may call.
    """
    mark = getattr(function, _MARK)
    if mark["wrapper"]:

        def wrapping(*values: Any) -> Iterator[Any]:
            return (yield from function(*values))

        copied: Any = wrapping
    else:

        def plain(*values: Any) -> Any:
            return function(*values)

        copied = plain
    names = dict(renames)
    # pluggy reads the names of parameters from the innermost wrapped function.
    copied.__wrapped__ = _shape(("self", *(names.get(name, name) for name in wanted_arguments(function))))
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(copied, attribute, getattr(function, attribute))
    if marked:
        setattr(copied, _MARK, mark)
    return copied


def _shape(names: Sequence[str]) -> FunctionType:
    """A function that does nothing and has these parameters."""
    code = (lambda: None).__code__.replace(
        co_argcount=len(names), co_nlocals=len(names), co_varnames=tuple(names), co_name="shape"
    )
    return FunctionType(code, {}, "shape")
