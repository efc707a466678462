"""A record of what torch_npu offers under the names that sources use, to notice when a release changes it.

An operation is recorded by its schemas and by whether it has a shape function and an autograd formula; a
Python function by its signature. The record names the version it was made with.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from mindspeed_core.errors import UserError
from mindspeed_megatron.devices.torch_npu_calls import resolve
from mindspeed_testing.npu.stubs import installed_version

Snapshot = Mapping[str, Any]


def schema_snapshot(names: Iterable[str]) -> dict[str, Any]:
    """Record names as `ApiUse.name` gives them.

    Args:
        names: ``torch_npu.npu_swiglu``, ``torch.ops.npu.npu_swiglu.default``, ``torch.npu.synchronize``.

    Returns:
        ``{"torch_npu": VERSION, "names": {NAME: [LINE, ...]}}``, ready for JSON; a name that does not exist
        has no lines.
    """
    return {
        "torch_npu": installed_version(),
        "names": {name: describe(name) for name in sorted({_without_overload(name) for name in names})},
    }


def compare_snapshot(recorded: Snapshot, names: Iterable[str]) -> list[str]:
    """List what differs from an earlier record for the names that sources use today, one line each."""
    today = schema_snapshot(names)
    before, now = recorded["names"], today["names"]
    versions = f"torch_npu {recorded['torch_npu']} -> {today['torch_npu']}"
    lines = [f"{name}: used, but not recorded" for name in now if name not in before]
    lines += [f"{name}: recorded, but no longer used" for name in before if name not in now]
    for name in sorted(set(before) & set(now)):
        if before[name] != now[name]:
            lines.append(f"{name} changed ({versions}):")
            lines += [f"  - {line}" for line in before[name] if line not in now[name]]
            lines += [f"  + {line}" for line in now[name] if line not in before[name]]
    return lines


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Write a record as JSON that is easy to compare."""
    path.write_text(json.dumps(snapshot, indent=1) + "\n", encoding="utf-8")


def read_snapshot(path: Path) -> dict[str, Any]:
    """Read a record.

    Raises:
        UserError: there is none, or it is not one.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); write it with --write-schemas {path}") from error
    if not isinstance(found, dict) or not isinstance(found.get("names"), dict) or "torch_npu" not in found:
        raise UserError(f"{path} is no record of schemas; write it with --write-schemas {path}")
    return found


def describe(name: str) -> list[str]:
    """Describe a name: schemas, the signature, or that it is a value; empty when it does not exist."""
    operation = operation_of(name)
    if operation is not None:
        namespace, _, short = operation.partition("::")
        return _schemas(operation, getattr(getattr(torch.ops, namespace), short))
    found = resolve(name)
    if found is None:
        return []
    if not callable(found):
        return [f"a value of type {type(found).__name__}"]
    try:
        return [f"{name.rpartition('.')[2]}{inspect.signature(found)}"]
    except (TypeError, ValueError):
        return ["callable"]


def operation_of(name: str) -> str | None:
    """Return the operation that a name stands for, ``npu::npu_swiglu``; None when it is something else."""
    parent, _, short = _without_overload(name).rpartition(".")
    for namespace in ("npu", "atb"):
        if parent in ("torch_npu", f"torch.ops.{namespace}") and hasattr(
            getattr(torch.ops, namespace), short
        ):
            return f"{namespace}::{short}"
    return None


def _without_overload(name: str) -> str:
    """Return the name without an overload: its schemas are recorded together."""
    parts = name.split(".")
    return ".".join(parts[:4]) if parts[:2] == ["torch", "ops"] else name


def _schemas(qualified: str, packet: Any) -> list[str]:
    lines = []
    for overload in packet.overloads():
        schema = getattr(packet, overload)._schema
        full = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
        kernels = [
            word
            for word, key in (("shapes", "Meta"), ("autograd", "AutogradPrivateUse1"))
            if torch._C._dispatch_has_kernel_for_dispatch_key(full, key)
        ]
        lines.append(f"{schema} [{', '.join(kernels) or 'no shapes, no autograd'}]")
    return lines or [qualified]
