"""Sets of plugins that fit their stages, remembered for each registry, and managers of a single stage.

Whether an implementation fits its stage depends on its class alone. A check of thousands of candidates asks
it once for every set of features, and registers only what implements the few stages that validation calls.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import cache
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import pluggy

from mindspeed_core import hooks
from mindspeed_core.feature import PROJECT
from mindspeed_core.registry import Registry

_known: WeakKeyDictionary[Registry, set[Hashable]] = WeakKeyDictionary()


def known_fits(registry: Registry) -> set[Hashable]:
    """Return the sets of plugins of a registry that were found to fit; may be added to."""
    return _known.setdefault(registry, set())


def stage_manager(stage: str, registry: Registry, plugins: Mapping[str, object]) -> pluggy.PluginManager:
    """Return a manager of one stage, with those of the plugins that implement it, in the order given.

    Args:
        stage: its name; one that nobody specifies gives a manager without hooks.
        registry: whose plugins publish further stages.
        plugins: every plugin of a session by name, in order of registration; known to fit.
    """
    manager = pluggy.PluginManager(PROJECT)
    specified = _specification(stage, registry)
    if specified is None:
        return manager
    specifications: Any = _Holder(stage, specified)
    manager.add_hookspecs(specifications)
    for name, plugin in plugins.items():
        implementation = getattr(plugin, stage, None)
        if getattr(implementation, PROJECT + "_impl", None) is not None:
            # Nothing but the stage is looked at: a plugin has a hundred other attributes.
            manager.register(_Holder(stage, implementation), name=name)
    return manager


class _Holder:
    """An object with one attribute."""

    def __init__(self, name: str, value: object) -> None:
        setattr(self, name, value)


def _specification(stage: str, registry: Registry) -> Callable[..., Any] | None:
    found = _core_specifications().get(stage)
    for specs in registry.stage_specs() if found is None else ():
        if stage in specs.stages:
            found = getattr(import_module(specs.module), stage, None)
    return found


@cache
def _core_specifications() -> Mapping[str, Callable[..., Any]]:
    functions = [f for name in hooks.STAGE_MODULES for f in vars(import_module(name)).values()]
    return {f.__name__: f for f in functions if hasattr(f, PROJECT + "_spec")}
