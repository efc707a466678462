"""Listing of the backends of an operator with why they cannot run here, and the check of contributed ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mindspeed_core.feature import DeclarationError
from mindspeed_kernels.ops.availability import device_missing
from mindspeed_kernels.ops.backend import Backend
from mindspeed_kernels.ops.choice import forced_backend
from mindspeed_kernels.ops.operator import OPERATORS, load_backends


@dataclass(frozen=True)
class Explanation:
    """One backend, and whether it could serve here.

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


def explain(operator: str, device: str = "") -> list[Explanation]:
    """Return every backend of an operator, the preferred one first, and why it cannot run here.

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
