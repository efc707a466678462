"""The file of ``--tune-space``: values to try for flags, and limits of what is tried.

.. code-block:: toml

    [flags]
    "--tensor-model-parallel-size" = [1, 2, 4]
    "--use-fused-rmsnorm" = [false, true]

    [limits]
    context_tokens = 4096
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_core.errors import UserError
from mindspeed_core.flags.flag_set import FlagSet

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found]

LIMITS = {"context_tokens": 4096, "chunks": 4, "tensor_parallel": 0, "seconds_per_run": 600}
"""Limits by default: tokens of a sequence that a rank keeps at least, chunks of a rank, ranks of tensor
parallelism (0: those of a node), and seconds after which a measured run, or a rank of a dry run, hangs."""


@dataclass(frozen=True)
class Space:
    """Values and limits that a user wants tried.

    Attributes:
        flags: values by flag; only these flags are narrowed or added.
        limits: of what is tried.
    """

    flags: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=lambda: dict(LIMITS))


def read_space(path: Path | None, known: FlagSet) -> Space:
    """Read a space file.

    Args:
        path: the file; None for the space that is searched by default.
        known: the flags that exist.

    Raises:
        UserError: names the file, the key and what is wrong with it.
    """
    if path is None:
        return Space()
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--tune-space {path}: cannot be read ({error}); name a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"--tune-space {path}: no TOML: {error}") from None
    for section, content in found.items():
        if section not in ("flags", "limits"):
            raise _wrong(path, section, "is no section; there are [flags] and [limits]")
        if not isinstance(content, Mapping):
            raise _wrong(path, section, "is a section: write its keys below it, as [section]")
    limits = dict(LIMITS)
    for key, value in found.get("limits", {}).items():
        if key not in LIMITS:
            raise _wrong(path, f"limits.{key}", f"is unknown; there are {', '.join(LIMITS)}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise _wrong(path, f"limits.{key}", f"is {value!r}; give a whole number above 0")
        limits[key] = value
    flags = {flag: _values(path, flag, values, known) for flag, values in found.get("flags", {}).items()}
    return Space(flags, limits)


def _values(path: Path, flag: str, values: Any, known: FlagSet) -> tuple[Any, ...]:
    if flag not in known:
        problem = known.unknown(flag)
        raise _wrong(path, flag, f"is no flag here: {problem.reason}; {problem.remedy}")
    if not isinstance(values, list) or not values:
        raise _wrong(path, flag, f"is {values!r}; give a list of values to try")
    entry = known[flag].flag
    for value in values:
        if value is False:
            continue
        if entry.is_switch != (value is True):
            wanted = "true or false" if entry.is_switch else "its values, or false for leaving it out"
            raise _wrong(path, flag, f"has {value!r} in its list; it takes {wanted}")
        words = [flag] if value is True else [flag, str(value)]
        problems = [p for p in known.parse(words).problems if p.flag in entry.options]
        if problems:
            raise _wrong(path, flag, f"lists a value it does not take: {problems[0].reason}")
    return tuple(values)


def _wrong(path: Path, key: str, problem: str) -> UserError:
    return UserError(f"--tune-space {path}: {key} {problem}")
