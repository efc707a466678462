"""mindspeed-core: the stages of a megatron-core training run as pluggy hooks.

Importing this package is free: every public name is resolved on first use, so that listing and planning
never load torch or megatron.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mindspeed_core.activation import activate as activate
    from mindspeed_core.activation import prepare as prepare
    from mindspeed_core.feature import Feature as Feature
    from mindspeed_core.feature import Flag as Flag
    from mindspeed_core.feature import Patch as Patch
    from mindspeed_core.feature import Requirement as Requirement
    from mindspeed_core.feature import Slot as Slot
    from mindspeed_core.feature import hookimpl as hookimpl
    from mindspeed_core.session import Session as Session

_PUBLIC = {
    "activate": "mindspeed_core.activation",
    "Feature": "mindspeed_core.feature",
    "Flag": "mindspeed_core.feature",
    "Patch": "mindspeed_core.feature",
    "Requirement": "mindspeed_core.feature",
    "Slot": "mindspeed_core.feature",
    "hookimpl": "mindspeed_core.feature",
    "prepare": "mindspeed_core.activation",
    "Session": "mindspeed_core.session",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
