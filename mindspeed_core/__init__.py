"""mindspeed-core: the stages of a megatron-core training run as pluggy hooks.

Importing this package is free: every public name is resolved on first use, so that listing and planning
never load torch or megatron.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspeed_core.moved import bridge_moved_modules

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mindspeed_core.activation import activate, prepare
    from mindspeed_core.discovery.feature_checks import check_feature
    from mindspeed_core.discovery.host import HostDeclaration
    from mindspeed_core.errors import (
        ArgumentError,
        CheckpointError,
        DataError,
        PatchError,
        SessionError,
        UserError,
    )
    from mindspeed_core.feature import (
        Conflict,
        DeclarationError,
        ExtensionPoint,
        Fallback,
        Feature,
        Flag,
        Gain,
        HookApi,
        Patch,
        Requirement,
        Resume,
        Scenario,
        Slot,
        StageSpecs,
        TakeOver,
        hookimpl,
    )
    from mindspeed_core.hooks import DONE
    from mindspeed_core.platforms.platform import Platform
    from mindspeed_core.registry import Registry
    from mindspeed_core.resolver.plan import Plan, PlanError
    from mindspeed_core.run import Batch, BoundarySchema, Datasets, Loss, Run, StepResult, TensorSpec
    from mindspeed_core.session import Session
    from mindspeed_core.validation import Checked, check
    from mindspeed_megatron.described_optimizer import DescribedOptimizer
    from mindspeed_megatron.inner_optimizer import put_inside
    from mindspeed_megatron.layer_spec import SpecEditor
    from mindspeed_megatron.lr_schedule import SchedulePoint, follow_schedule
    from mindspeed_megatron.parameter_parts import Holding, ParameterPart

_MODULES = {
    "activation": "activate prepare",
    "discovery.feature_checks": "check_feature",
    "discovery.host": "HostDeclaration",
    "errors": "ArgumentError CheckpointError DataError PatchError SessionError UserError",
    "feature": (
        "Conflict DeclarationError ExtensionPoint Fallback Feature Flag Gain HookApi Patch Requirement "
        "Resume Scenario Slot StageSpecs TakeOver hookimpl"
    ),
    "hooks": "DONE",
    "platforms.platform": "Platform",
    "registry": "Registry",
    "resolver.plan": "Plan PlanError",
    "run": "Batch BoundarySchema Datasets Loss Run StepResult TensorSpec",
    "session": "Session",
    "validation": "Checked check",
}
_PARTS = tuple(
    "DescribedOptimizer Holding ParameterPart SchedulePoint SpecEditor follow_schedule put_inside".split()
)
"""Names that mindspeed-megatron supplies, see `mindspeed_core.discovery.parts`."""
_PUBLIC = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names.split()}
_PUBLIC |= dict.fromkeys(_PARTS, f"{__name__}.discovery.parts")

__all__ = [
    "DONE",
    "ArgumentError",
    "Batch",
    "BoundarySchema",
    "Checked",
    "CheckpointError",
    "Conflict",
    "DataError",
    "Datasets",
    "DeclarationError",
    "DescribedOptimizer",
    "ExtensionPoint",
    "Fallback",
    "Feature",
    "Flag",
    "Gain",
    "Holding",
    "HookApi",
    "HostDeclaration",
    "Loss",
    "ParameterPart",
    "Patch",
    "PatchError",
    "Plan",
    "PlanError",
    "Platform",
    "Registry",
    "Requirement",
    "Resume",
    "Run",
    "Scenario",
    "SchedulePoint",
    "Session",
    "SessionError",
    "Slot",
    "SpecEditor",
    "StageSpecs",
    "StepResult",
    "TakeOver",
    "TensorSpec",
    "UserError",
    "activate",
    "check",
    "check_feature",
    "follow_schedule",
    "hookimpl",
    "prepare",
    "put_inside",
]


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
