"""mindspeed-core: the stages of a megatron-core training run as pluggy hooks.

Importing this package is free: every public name is resolved on first use, so that listing and planning
never load torch or megatron.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if sys.version_info < (3, 10):  # noqa: UP036 - a checkout on the module path asks no installer
    _found = ".".join(map(str, sys.version_info[:3]))
    raise ImportError(f"mindspeed-core needs Python 3.10 or newer, and {sys.executable} is Python {_found}")

from mindspeed_core.moved import bridge_moved_modules

__version__ = "0.1.0"

if TYPE_CHECKING:
    # A name that is imported as itself is exported.
    from mindspeed_core.activation import activate as activate
    from mindspeed_core.activation import prepare as prepare
    from mindspeed_core.batch import Batch as Batch
    from mindspeed_core.batch import Loss as Loss
    from mindspeed_core.conditions import Conflict as Conflict
    from mindspeed_core.conditions import Fallback as Fallback
    from mindspeed_core.conditions import Requirement as Requirement
    from mindspeed_core.conditions import Slot as Slot
    from mindspeed_core.conditions import TakeOver as TakeOver
    from mindspeed_core.discovery.feature_checks import check_feature as check_feature
    from mindspeed_core.discovery.host import HostDeclaration as HostDeclaration
    from mindspeed_core.errors import ArgumentError as ArgumentError
    from mindspeed_core.errors import CheckpointError as CheckpointError
    from mindspeed_core.errors import DataError as DataError
    from mindspeed_core.errors import DeclarationError as DeclarationError
    from mindspeed_core.errors import PatchError as PatchError
    from mindspeed_core.errors import SessionError as SessionError
    from mindspeed_core.errors import UserError as UserError
    from mindspeed_core.feature import ExtensionPoint as ExtensionPoint
    from mindspeed_core.feature import Feature as Feature
    from mindspeed_core.feature import Flag as Flag
    from mindspeed_core.feature import HookApi as HookApi
    from mindspeed_core.feature import Patch as Patch
    from mindspeed_core.feature import StageSpecs as StageSpecs
    from mindspeed_core.feature import hookimpl as hookimpl
    from mindspeed_core.hooks import DONE as DONE
    from mindspeed_core.platforms.platform import Platform as Platform
    from mindspeed_core.registry import Registry as Registry
    from mindspeed_core.resolver.plan import Plan as Plan
    from mindspeed_core.resolver.plan import PlanError as PlanError
    from mindspeed_core.run import BoundarySchema as BoundarySchema
    from mindspeed_core.run import Datasets as Datasets
    from mindspeed_core.run import Run as Run
    from mindspeed_core.run import StepResult as StepResult
    from mindspeed_core.run import TensorSpec as TensorSpec
    from mindspeed_core.scenario import Gain as Gain
    from mindspeed_core.scenario import Proofs as Proofs
    from mindspeed_core.scenario import Resume as Resume
    from mindspeed_core.scenario import Scenario as Scenario
    from mindspeed_core.session import Session as Session
    from mindspeed_core.validation import Checked as Checked
    from mindspeed_core.validation import check as check
    from mindspeed_megatron.described_optimizer import DescribedOptimizer as DescribedOptimizer
    from mindspeed_megatron.inner_optimizer import put_inside as put_inside
    from mindspeed_megatron.layer_spec import SpecEditor as SpecEditor
    from mindspeed_megatron.lr_schedule import SchedulePoint as SchedulePoint
    from mindspeed_megatron.lr_schedule import follow_schedule as follow_schedule
    from mindspeed_megatron.parameter_parts import Holding as Holding
    from mindspeed_megatron.parameter_parts import ParameterPart as ParameterPart

_MODULES = {
    "activation": "activate prepare",
    "batch": "Batch Loss",
    "conditions": "Conflict Fallback Requirement Slot TakeOver",
    "discovery.feature_checks": "check_feature",
    "discovery.host": "HostDeclaration",
    "errors": "ArgumentError CheckpointError DataError DeclarationError PatchError SessionError UserError",
    "feature": "ExtensionPoint Feature Flag HookApi Patch StageSpecs hookimpl",
    "hooks": "DONE",
    "platforms.platform": "Platform",
    "registry": "Registry",
    "resolver.plan": "Plan PlanError",
    "run": "BoundarySchema Datasets Run StepResult TensorSpec",
    "scenario": "Gain Proofs Resume Scenario",
    "session": "Session",
    "validation": "Checked check",
}
_PARTS = tuple(
    "DescribedOptimizer Holding ParameterPart SchedulePoint SpecEditor follow_schedule put_inside".split()
)
"""Names that mindspeed-megatron supplies, see `mindspeed_core.discovery.parts`."""
_PUBLIC = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names.split()}
_PUBLIC |= dict.fromkeys(_PARTS, f"{__name__}.discovery.parts")

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _PARTS:
        from mindspeed_core.discovery.parts import part

        return part(name)
    from importlib import import_module

    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])


bridge_moved_modules()
