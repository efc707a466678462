"""Hardware files: what a device, a node and their links can do, as TOML with units.

Files of common devices come with the package (`shipped`); each says where its numbers come from and which of
them nobody has verified. A number of a vendor is a peak: ``[efficiency]`` says what part of it a training
reaches, and is an assumption until it is measured.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from mindspeed_core.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found]

_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_UNITS: dict[str, dict[str, float]] = {
    "bytes": {f"{prefix}B": factor for prefix, factor in (_PREFIXES | _BINARY).items()},
    "bytes per second": {f"{prefix}B/s": factor for prefix, factor in (_PREFIXES | _BINARY).items()}
    | {f"{prefix}bit/s": factor / 8 for prefix, factor in _PREFIXES.items()},
    "operations per second": {f"{prefix}FLOP/s": factor for prefix, factor in _PREFIXES.items()},
    "seconds": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
}
_QUANTITY = re.compile(r"\s*([-+]?[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z/]+)\s*\Z")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all")
"""Collectives whose speed may differ from that of an all-reduce."""

_KEYS: dict[str, dict[str, str]] = {
    "device": {
        "name": "text",
        "memory": "bytes",
        "bf16": "operations per second",
        "fp16": "operations per second",
        "fp32": "operations per second",
        "memory_bandwidth": "bytes per second",
        "update_bandwidth": "bytes per second",
        "launch": "seconds",
    },
    "node": {"devices": "count"},
    "links": {
        "within_node": "bytes per second",
        "between_nodes": "bytes per second",
        "latency_within_node": "seconds",
        "latency_between_nodes": "seconds",
    },
    "collectives": dict.fromkeys(COLLECTIVES, "ratio"),
    "efficiency": {"matrix": "share", "attention": "share", "memory": "share", "links": "share"},
    "reserved": {"context": "bytes", "per_group": "bytes"},
    "calibration": {"untrusted": "text"},
    "sources": {},
    "unverified": {},
}
ONE_RANK = "assumed: one rank sends nothing"
"""Source of the links in a file that was calibrated with one rank."""
_REQUIRED = (("device", "name"), ("device", "memory"), ("device", "bf16"), ("device", "memory_bandwidth"))


@dataclass(frozen=True)
class Hardware:
    """A device and what connects it, in bytes, operations and seconds.

    Attributes:
        name: of the device.
        memory: bytes of device memory.
        flops: peak operations per second by dtype, ``bfloat16``, ``float16``, ``float32``.
        memory_bandwidth: bytes per second between the device and its memory.
        launch: seconds to launch an operator that computes less than that.
        devices: on a node.
        within_node: bytes per second that a device sends to another one of its node.
        between_nodes: bytes per second that a device sends to another node.
        latency_within_node: seconds of a call that moves nothing.
        latency_between_nodes: likewise, across nodes.
        matrix: part of the peak that matrix products reach.
        attention: part of the peak that attention kernels reach.
        memory_share: part of the memory bandwidth that other operators reach.
        link_share: part of a link's bandwidth that collectives reach.
        collectives: bytes per second of a collective as a multiple of those of an all-reduce; 1 where it is
            not named.
        update_bandwidth: bytes per second of an optimizer's update, which works in place; None where it is
            that of other operators.
        context: bytes that runtime and kernels take beside the allocator.
        per_group: bytes of communication buffers of each group that is used.
        sources: where the numbers come from, by key.
        unverified: keys whose numbers are assumed, or quoted without a measurement.
        path: the file.
        untrusted: why rankings by these numbers are not to be trusted; empty where they are.
    """

    name: str
    memory: float
    flops: Mapping[str, float]
    memory_bandwidth: float
    launch: float
    devices: int
    within_node: float
    between_nodes: float
    latency_within_node: float
    latency_between_nodes: float
    matrix: float
    attention: float
    memory_share: float
    link_share: float
    context: float
    per_group: float
    sources: Mapping[str, str]
    unverified: tuple[str, ...]
    path: str = ""
    untrusted: str = ""
    collectives: Mapping[str, float] = field(default_factory=dict)
    update_bandwidth: float | None = None

    def bandwidth(self, crosses_nodes: bool, operation: str = "") -> float:
        """Return the bytes per second that an operation reaches; an all-reduce or a message by default."""
        own = next((part for name, part in self.collectives.items() if operation.startswith(name)), 1.0)
        return (self.between_nodes if crosses_nodes else self.within_node) * self.link_share * own

    def update_seconds(self, moved: float) -> float:
        """Return how long an optimizer's update takes that reads and writes so many bytes."""
        return moved / (self.update_bandwidth or self.memory_bandwidth * self.memory_share)

    def latency(self, crosses_nodes: bool) -> float:
        """Return the seconds of a call that moves nothing."""
        return self.latency_between_nodes if crosses_nodes else self.latency_within_node


def shipped() -> dict[str, Path]:
    """Return the files that come with the package, by name."""
    folder = Path(str(files("mindspeed_tune"))) / "data"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def read_hardware(name: str) -> Hardware:
    """Read a hardware file, or one that comes with the package.

    Args:
        name: a path, or the name of a shipped file, ``ascend-910b``.

    Raises:
        UserError: names the file, the key and what is wrong with it.
    """
    path = shipped().get(name, Path(name))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--plan-hardware {name}: cannot be read ({error}); name a TOML file, or one that comes with "
            f"mindspeed-tune: {', '.join(shipped())}"
        ) from None
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"--plan-hardware {path}: no TOML: {error}") from None
    return _checked(found, str(path))


def _checked(found: Mapping[str, Any], path: str) -> Hardware:
    values: dict[str, Any] = {}
    for section, content in found.items():
        if section not in _KEYS:
            raise _wrong(path, section, f"is no section; there are {', '.join(_KEYS)}")
        if section == "unverified":
            continue
        if not isinstance(content, Mapping):
            raise _wrong(path, section, "is a section: write its keys below it, as [section]")
        for key, value in content.items():
            if section == "sources":
                continue
            kind = _KEYS[section].get(key)
            if kind is None:
                raise _wrong(path, f"{section}.{key}", f"is unknown; there are {', '.join(_KEYS[section])}")
            values[f"{section}.{key}"] = _value(path, f"{section}.{key}", kind, value)
    for section, key in _REQUIRED:
        if f"{section}.{key}" not in values:
            raise _wrong(path, f"{section}.{key}", "is missing")
    bf16 = values["device.bf16"]
    flops = {
        "bfloat16": bf16,
        "float16": values.get("device.fp16", bf16),
        "float32": values.get("device.fp32", bf16 / 2),
    }
    within = values.get("links.within_node", 50e9)
    return Hardware(
        name=values["device.name"],
        memory=values["device.memory"],
        flops=flops,
        memory_bandwidth=values["device.memory_bandwidth"],
        launch=values.get("device.launch", 5e-6),
        devices=values.get("node.devices", 8),
        within_node=within,
        between_nodes=values.get("links.between_nodes", within),
        latency_within_node=values.get("links.latency_within_node", 10e-6),
        latency_between_nodes=values.get("links.latency_between_nodes", 30e-6),
        matrix=values.get("efficiency.matrix", 0.6),
        attention=values.get("efficiency.attention", 0.4),
        memory_share=values.get("efficiency.memory", 0.7),
        link_share=values.get("efficiency.links", 0.7),
        context=values.get("reserved.context", 2.0**30),
        per_group=values.get("reserved.per_group", 0.0),
        sources=_texts(path, found.get("sources", {})),
        unverified=_listed(path, found.get("unverified", {})),
        path=path,
        untrusted=values.get("calibration.untrusted", ""),
        collectives={
            name: values[f"collectives.{name}"] for name in COLLECTIVES if f"collectives.{name}" in values
        },
        update_bandwidth=values.get("device.update_bandwidth"),
    )


def _value(path: str, key: str, kind: str, value: Any) -> Any:
    if kind == "text":
        if not isinstance(value, str) or not value:
            raise _wrong(path, key, f"is {value!r}; give a text in quotes")
        return value
    if kind in ("count", "share", "ratio"):
        if isinstance(value, bool) or not isinstance(value, int if kind == "count" else (int, float)):
            raise _wrong(path, key, f"is {value!r}; give a {'whole ' if kind == 'count' else ''}number")
        if value <= 0:
            raise _wrong(path, key, f"is {value}, which is not above 0")
        if kind == "share" and value > 1:
            raise _wrong(path, key, f"is {value}; it is a part of the peak, at most 1")
        return value
    units = _UNITS[kind]
    match = _QUANTITY.match(value) if isinstance(value, str) else None
    example = {"bytes": "64 GiB", "seconds": "10 us", "operations per second": "313 TFLOP/s"}.get(
        kind, "392 GB/s"
    )
    if match is None:
        raise _wrong(path, key, f"is {value!r}; give a number with a unit of {kind}, {example!r}")
    number, unit = float(match[1]), match[2]
    if unit not in units:
        raise _wrong(path, key, f"has the unit {unit!r}, which is none of {kind}; write {example!r}")
    if number < 0 or (number == 0 and kind != "seconds" and not key.startswith("reserved.")):
        raise _wrong(path, key, f"is {value!r}, which is not above 0")
    return number * units[unit]


def _texts(path: str, found: Mapping[str, Any]) -> dict[str, str]:
    for key, value in found.items():
        if not isinstance(value, str):
            raise _wrong(path, f"sources.{key}", f"is {value!r}; a source is a text")
    return dict(found)


def _listed(path: str, found: Any) -> tuple[str, ...]:
    keys = found.get("keys", []) if isinstance(found, Mapping) else None
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise _wrong(path, "unverified", 'lists keys: keys = ["device.bf16"]')
    return tuple(keys)


def _wrong(path: str, key: str, problem: str) -> UserError:
    return UserError(f"--plan-hardware {path}: {key} {problem}")
