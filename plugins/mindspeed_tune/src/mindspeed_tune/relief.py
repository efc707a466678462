"""Features that a launch does without, and that would keep less for backward where they take part.

Nothing here knows a feature: what one keeps says its formula ``activation_bytes``, where it takes part say
the roles of the modules that it replaces, and whether it fits into the launch says the resolver.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterable, Iterator
from typing import Any

from mindspeed_core.discovery.slots import claimed_roles
from mindspeed_core.errors import UserError
from mindspeed_core.feature import Feature
from mindspeed_core.resolver.plan import PlanError
from mindspeed_core.resolver.resolve import resolve
from mindspeed_megatron.formulas import ELEMENT_SIZE, evaluate, formula_of
from mindspeed_tune.record import Relief

_QUANTITY = "activation_bytes"
_SIZE = "_parallel_size"
"""Another layout keeps less of everything, on more ranks: that is no matter of a feature."""
_LAYER = re.compile(r"(.*\blayers\.\d+)\.")


def reliefs(session: Any, run: Any) -> tuple[Relief, ...]:
    """Return what installed features that are not active would keep of a micro-batch on this rank.

    Args:
        session: whose plan decides which features are active.
        run: whose chunks say how many layers have modules of a role.
    """
    return tuple(_all(session, run))


def _all(session: Any, run: Any) -> Iterator[Relief]:
    registry = session.registry
    # A dry run stands for the platform that it is like: its kernels are those that run.
    platform = "npu" if "npu" in session.platform.kinds() else "cpu"
    paths = [name for chunk in run.model for name, _ in chunk.named_modules()]
    size = {ELEMENT_SIZE: run.config.params_dtype.itemsize}
    for name, record in registry.features.items():
        feature = record.cls
        if name in session.plan.names or _QUANTITY not in feature.formulas:
            continue
        roles = claimed_roles(feature, registry.slots)
        layers = _layers(paths, roles)
        if not layers:
            continue
        for flag, args in _switched(session, run, feature):
            try:
                kept = evaluate(formula_of(feature, _QUANTITY, platform), {**vars(args), **size})
            except UserError:
                continue  # it uses an argument that this training leaves open
            yield Relief(name, flag, tuple(sorted(roles)), kept * layers)


def _switched(session: Any, run: Any, feature: type[Feature]) -> Iterator[tuple[str, Namespace]]:
    """Yield flags worth trying that make a feature active, with the arguments they stand for."""
    for name, flag in ((flag.name, flag) for flag in feature.flags):
        if flag.dest.endswith(_SIZE):
            continue
        for value in feature.tuning.get(name, ()):
            if value == getattr(run.args, flag.dest, flag.default):
                continue
            args = Namespace(**{**vars(run.args), flag.dest: value})
            if _active(session, args, feature.name):
                yield (name if value is True else f"{name} {value}"), args


def _active(session: Any, args: Namespace, name: str) -> bool:
    try:
        plan = resolve(
            session.registry,
            args,
            platform=session.platform.name,
            host=session.host.name,
            mode=session.mode,
        )
    except PlanError:
        return False
    return name in plan.names


def _layers(paths: Iterable[str], roles: frozenset[str]) -> int:
    """Count layers that have a module of a role."""
    found = set()
    for path in paths:
        layer = _LAYER.match(path)
        if layer is not None and roles.intersection(path[layer.end() :].split(".")):
            found.add(layer[1])
    return len(found)
