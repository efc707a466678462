"""The file of a swap policy: JSON of its model, its settings, and what each stage swaps; no torch.

A file with settings alone asks for a policy that follows them; it is filled in when the policy is made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_core.errors import ArgumentError

FLAG = "--swap-policy"
_FORMAT, _VERSION = "mindspeed-memory swap policy", 1
_GIGABYTE = 10**9
_MADE_AGAIN = "delete it, and the run makes a new one"


@dataclass(frozen=True)
class Settings:
    """Facts that a policy is made by.

    Attributes:
        bandwidth_gb_s: between device and host, each way, in 10^9 bytes a second.
        reduction_bytes: by how much the peak is to fall; None for as much as can be swapped in time.
    """

    bandwidth_gb_s: float = 25.6
    reduction_bytes: int | None = None

    @property
    def bandwidth(self) -> float:
        """Return bytes a second."""
        return self.bandwidth_gb_s * _GIGABYTE


@dataclass(frozen=True)
class ChunkSwaps:
    """Tensors that a pass through a chunk swaps.

    Attributes:
        saved: how many values a pass saves that could be swapped.
        swapped: numbers of those that are, from 0.
    """

    saved: int
    swapped: tuple[int, ...]


@dataclass(frozen=True)
class SwapPolicy:
    """The content of the file.

    Attributes:
        model: facts of the model and its layout, by name.
        settings: it was made by.
        stages: for each pipeline stage what its chunks swap; empty where there are settings alone.
    """

    model: Mapping[str, Any] = field(default_factory=dict)
    settings: Settings = Settings()
    stages: tuple[tuple[ChunkSwaps, ...], ...] = ()


def write_policy(path: Path, policy: SwapPolicy) -> None:
    """Write a policy; whoever reads the file sees the old one or the new one."""
    stages = [[asdict(chunk) for chunk in stage] for stage in policy.stages]
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "settings": asdict(policy.settings),
        "model": dict(policy.model),
        "stages": stages,
    }
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def read_policy(path: Path, model: Mapping[str, Any]) -> SwapPolicy:
    """Read a policy of this model.

    Args:
        path: of the file.
        model: facts of this run.

    Raises:
        ArgumentError: it cannot be read, is damaged, or was made for another model; names what differs.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror or error}", "give another file") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _refused(path, f"is no JSON, or cut off: {error}", _MADE_AGAIN) from error
    try:
        settings, stages = _settings(content), _stages(content)
    except (KeyError, TypeError, ValueError) as error:
        raise _refused(path, f"is damaged: {_what(error)}", _MADE_AGAIN) from error
    if not stages:
        return SwapPolicy(model, settings)
    made_for = content.get("model")
    if not isinstance(made_for, dict):
        raise _refused(path, "is damaged: it does not say which model it is of", _MADE_AGAIN)
    for name in sorted({*made_for, *model}):
        if made_for.get(name) != model.get(name):
            raise _refused(
                path,
                f"is of another model: made for {name} {made_for.get(name)}, this run has {model.get(name)}",
                f"give another file, or {_MADE_AGAIN}",
            )
    return SwapPolicy(model, settings, stages)


def _settings(content: Any) -> Settings:
    if not isinstance(content, dict):
        raise TypeError("it is no object")
    if content.get("version", _VERSION) != _VERSION or content.get("format", _FORMAT) != _FORMAT:
        raise ValueError(f"format {content.get('format')!r}, version {content.get('version')!r}")
    given = content.get("settings", {})
    if not isinstance(given, dict):
        raise TypeError("its settings are no object")
    unknown = given.keys() - Settings.__dataclass_fields__.keys()
    if unknown:
        raise ValueError(f"settings have no {min(unknown)!r}; there are {', '.join(asdict(Settings()))}")
    settings = Settings(**given)
    bandwidth, reduction = settings.bandwidth_gb_s, settings.reduction_bytes
    if isinstance(bandwidth, bool) or not isinstance(bandwidth, (int, float)) or not 0 < bandwidth < 1e9:
        raise ValueError(f"bandwidth_gb_s is {bandwidth!r}")
    if reduction is not None and (
        isinstance(reduction, bool) or not isinstance(reduction, int) or reduction < 0
    ):
        raise ValueError(f"reduction_bytes is {reduction!r}")
    return settings


def _stages(content: Mapping[str, Any]) -> tuple[tuple[ChunkSwaps, ...], ...]:
    return tuple(tuple(_chunk(chunk) for chunk in stage) for stage in content.get("stages", ()))


def _chunk(chunk: Any) -> ChunkSwaps:
    saved, swapped = chunk["saved"], chunk["swapped"]
    numbers = [saved, *swapped]
    if any(isinstance(number, bool) or not isinstance(number, int) for number in numbers):
        raise TypeError("numbers of saved values are whole numbers")
    if swapped and not 0 <= min(swapped) <= max(swapped) < saved:
        raise ValueError(f"of {saved} saved values number {max(swapped, key=abs)} is to be swapped")
    return ChunkSwaps(saved, tuple(swapped))


def _what(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _refused(path: Path, reason: str, remedy: str) -> ArgumentError:
    return ArgumentError(FLAG, str(path), reason, remedy)
