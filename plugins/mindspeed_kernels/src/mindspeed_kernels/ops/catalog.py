"""All operators of this process, the backends that other packages bring, and what could serve here.

Other packages name an iterable of `Backend` objects in the entry-point group ``mindspeed_kernels.backends``
(the extension point ``kernels.backends``). They are loaded when an operator first chooses a backend, with or
without a session; a package that cannot be loaded takes nobody else down.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from mindspeed_core.discovery.entry_points import sources
from mindspeed_core.feature import DeclarationError
from mindspeed_core.registry import Registry
from mindspeed_kernels.ops.availability import device_missing
from mindspeed_kernels.ops.choice import BackendError, forced_backend
from mindspeed_kernels.ops.operator import OPERATORS, Backend

logger = logging.getLogger("mindspeed_kernels.ops")

POINT = "kernels.backends"
GROUP = "mindspeed_kernels.backends"

_loaded: list[tuple[str, str]] | None = None


@dataclass(frozen=True)
class Explanation:
    """Whether one backend could serve here.

    Attributes:
        operator: name of the operator.
        backend: name of the backend.
        devices: types of devices it is for.
        priority: the higher, the more preferred.
        missing: why it cannot run in this process; empty when it can.
        forced: it was asked for by flag, variable or context manager.
        deterministic: the same bits on every run.
        dist: the package that brings it.
    """

    operator: str
    backend: str
    devices: tuple[str, ...]
    priority: int
    missing: str
    forced: bool
    deterministic: bool
    dist: str


def check_backends(extension: Any) -> None:
    """Refuse what is no iterable of backends for operators that exist.

    Raises:
        DeclarationError: says what is wrong.
    """
    if isinstance(extension, (str, type)) or not isinstance(extension, Iterable):
        raise DeclarationError(f"{extension!r} is not an iterable of mindspeed_kernels.ops.Backend")
    for backend in extension:
        if not isinstance(backend, Backend):
            raise DeclarationError(f"{backend!r} is not a mindspeed_kernels.ops.Backend")
        if backend.operator not in OPERATORS:
            known = ", ".join(sorted(OPERATORS))
            raise DeclarationError(f"there is no operator {backend.operator!r}; there are {known}")


def load_backends() -> None:
    """Load the backends of other packages, once per process; those that cannot be used are warned about."""
    global _loaded
    if _loaded is not None:
        return
    _loaded = []
    # All operators exist before backends are added to them.
    import_module("mindspeed_kernels.ops")
    owners = {source.name: source.dist for source in sources(GROUP)}
    if not owners:
        return
    registry = Registry.discover()
    if POINT not in registry.extension_points():
        return
    for entry, backends in registry.extensions(POINT).items():
        for backend in backends:
            try:
                OPERATORS[backend.operator].add(replace(backend, dist=owners[entry]))
            except BackendError as error:
                logger.warning("entry point %s of %s: %s", entry, GROUP, error)
                continue
            _loaded.append((backend.operator, backend.name))
    for broken in registry.broken:
        if broken.entry_point in owners:
            logger.warning("%s", broken)


def forget_backends() -> None:
    """Take away the backends of other packages and look for them again at the next first call."""
    global _loaded
    for operator, backend in _loaded or ():
        OPERATORS[operator].remove(backend)
    _loaded = None


def explain(operator: str, device: str = "") -> list[Explanation]:
    """Every backend of an operator, the preferred one first, and why it cannot run here.

    Args:
        operator: its name.
        device: only backends for this type of device; all by default.

    Raises:
        KeyError: there is no such operator.
    """
    load_backends()
    found = OPERATORS[operator]
    forced = forced_backend(operator)[0]
    backends = found.candidates(device) if device else list(found.backends.values())
    explanations = []
    for backend in sorted(backends, key=lambda item: (-item.priority, item.name)):
        reasons = [device_missing(kind) for kind in backend.devices if kind != "*"]
        missing = "" if not reasons or "" in reasons else "; ".join(reasons)
        explanations.append(
            Explanation(
                operator,
                backend.name,
                backend.devices,
                backend.priority,
                missing or backend.available(),
                backend.name == forced,
                backend.deterministic,
                backend.dist,
            )
        )
    return explanations
