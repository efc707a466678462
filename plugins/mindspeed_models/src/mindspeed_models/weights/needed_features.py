"""Features that a model needs: converted checkpoints say it as those of trainings do.

A load without one of these features is then refused, and one with them is accepted. Loads no torch.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from mindspeed_core.errors import DataError
from mindspeed_core.flags.flag_set import FlagSet, known_flags
from mindspeed_core.registry import FeatureRecord, Registry
from mindspeed_core.resolver.plan import ActiveFeature
from mindspeed_models.model_plan import ModelPlan

_HOST = "standalone"
"""Whose flags are looked at; every host has those of features."""


def plan_for_manifest(plan: ModelPlan, registry: Registry | None = None) -> dict[str, Any]:
    """Return what a manifest says of features: those without which the weights are another model's.

    Args:
        plan: the model.
        registry: what is installed; read from the environment by default.

    Raises:
        DataError: the model has a value of a flag that no installed package offers; names both and the way
            out.
    """
    registry = registry or Registry.discover()
    args = _arguments(plan, known_flags(registry, _HOST))
    needed = [record for record in registry.features.values() if _needs(record, args)]
    return {"features": [asdict(_described(record, plan)) for record in needed]}


def _arguments(plan: ModelPlan, flags: FlagSet) -> Namespace:
    """Return the arguments that the flags of this model give, all others at their defaults."""
    parsed = flags.parse_mapping(dict(_chosen(plan, flags)))
    if parsed.problems:
        first = parsed.problems[0]
        raise DataError(f"the model has {first.flag} {first.reason}; {first.remedy}")
    return Namespace(**{**vars(parsed.args), **plan.arguments})


def _chosen(plan: ModelPlan, flags: FlagSet) -> Iterator[tuple[str, Any]]:
    """Yield the arguments whose flag has choices, to which packages add their own."""
    for entry in flags.entries:
        value = plan.arguments.get(entry.flag.dest)
        if entry.flag.choices and isinstance(value, str):
            yield entry.flag.dest, value


def _needs(record: FeatureRecord, args: Namespace) -> bool:
    return bool(record.cls.affects_checkpoint) and record.cls.enabled(args)


def _described(record: FeatureRecord, plan: ModelPlan) -> ActiveFeature:
    cls = record.cls
    flags = (
        f"{flag.name} {_shown(plan.arguments[flag.dest])}"
        for flag in cls.flags
        if flag.dest in plan.arguments
    )
    why = next(flags, cls.name).rstrip()
    return ActiveFeature(
        cls.name, record.dist, record.version, cls.family, cls.level, why, affects_checkpoint=True
    )


def _shown(value: Any) -> str:
    """Return what is typed behind a flag: nothing behind a switch."""
    return "" if isinstance(value, bool) else str(value)
