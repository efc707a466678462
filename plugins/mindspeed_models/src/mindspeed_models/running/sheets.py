"""Sheets: the flags with which a model is trained, and its layouts by the number of devices.

One small file for a family and size. ``common.toml`` holds what all share, and ``like`` names a further file
between the two. Names are those of flags without dashes in front; ``true`` gives a flag without value,
``false`` takes one of the shared ones away.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_core.errors import UserError, guess
from mindspeed_models.families import named_model

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found]

Table = Mapping[str, Any]
SUFFIX = ".toml"
_COMMON = "common"
_SHARED = (_COMMON, "tiny")
"""Files that other sheets are written on."""
_TINY = "tiny-"
_TABLES = ("flags", "kernels", "steps", "layouts")
_PRECISIONS = ("bf16", "fp16")
_KEYS = ("model", "like", "vocab-size", "train-from", *_TABLES)
_FOLDER = Path(__file__).with_name("sheets")


@dataclass(frozen=True)
class Sheet:
    """The schedule of a training: rates, steps and sizes.

    Attributes:
        model: its name as ``--model`` takes it.
        flags: of every training.
        kernels: flags of fused kernels, which a training does without as well.
        steps: flags by step.
        layouts: parallel sizes by number of devices; a table in one is for the step of its name alone.
        train_from: fewest devices that hold the whole training; fewer are for adapters.
        vocab_size: tokens of a model that is made here, in place of those of the size; None leaves them.
    """

    model: str
    flags: Table
    kernels: Table
    steps: Mapping[str, Table]
    layouts: Mapping[int, Table]
    train_from: int = 1
    vocab_size: int | None = None

    @property
    def devices(self) -> tuple[int, ...]:
        """Return the numbers of devices that it has layouts for, ascending."""
        return tuple(sorted(self.layouts))

    def training(self, step: str, devices: int, *, kernels: bool = True) -> dict[str, Any]:
        """Return the flags of a training step on so many devices.

        Raises:
            UserError: there is no layout for them, or they do not hold the training.
        """
        layout = self._layout(devices)
        if step != "lora" and devices < self.train_from:
            raise UserError(
                f"--devices {devices}: weights, gradients and optimizer of {self.model} need at least "
                f"{self.train_from} devices; use more, or train adapters (run … lora)"
            )
        return self._joined(self.flags, step, layout, kernels)

    def inference(self, step: str, devices: int, *, kernels: bool = True) -> dict[str, Any]:
        """Return the flags of a step that asks the trained model on so many devices.

        They are the layout, the kernels, the precision and what the sheet says of the step; flags of a
        training have no part in it.

        Raises:
            UserError: there is no layout for the devices.
        """
        precision = {name: value for name, value in self.flags.items() if name in _PRECISIONS}
        found = self._joined(precision, step, self._layout(devices), kernels)
        found.pop("sequence-parallel", None)
        return found

    def _layout(self, devices: int) -> Table:
        if devices not in self.layouts:
            known = ", ".join(map(str, self.devices))
            raise UserError(
                f"--devices {devices}: the sheet of {self.model} has layouts for {known}; use one of them, "
                "or write a sheet of your own and name its file in place of the model"
            )
        return self.layouts[devices]

    def _joined(self, flags: Table, step: str, layout: Table, kernels: bool) -> dict[str, Any]:
        sizes = {name: value for name, value in layout.items() if not isinstance(value, dict)}
        found = {
            **flags,
            **(self.kernels if kernels else {}),
            **self.steps.get(step, {}),
            **sizes,
            **layout.get(step, {}),
        }
        return {name: value for name, value in found.items() if value is not False}


def words_of(flags: Table) -> list[str]:
    """Return the words of a command line for flags by name."""
    words: list[str] = []
    for name, value in flags.items():
        words.append(f"--{name}")
        if value is not True:
            words += map(str, value) if isinstance(value, list) else [str(value)]
    return words


def sheet_names() -> list[str]:
    """Return the names of the models that have a sheet."""
    return sorted(each.stem for each in _FOLDER.glob(f"*{SUFFIX}") if each.stem not in _SHARED)


def find_sheet(name: str, size: str | None = None) -> Sheet:
    """Return the sheet of a model, or that of a file.

    Args:
        name: a model, with its size (``llama2-13b``), ``tiny-llama2``, or the path of a ``.toml`` file.
        size: the size, where ``name`` has none.

    Raises:
        UserError: there is none; names the nearest.
    """
    if name.endswith(SUFFIX):
        return read_sheet(Path(name), name)
    lower = name.lower()
    if lower.startswith(_TINY):
        lower, size = lower.removeprefix(_TINY), size or _TINY.removesuffix("-")
    recipe, config = named_model(lower if size is None else f"{lower}-{size}")
    if config is None:
        known = [each for each in sheet_names() if each.rpartition("-")[0] == recipe.name]
        raise UserError(f"{name}: say which size with --size; there are sheets for {', '.join(known)}")
    spelled = f"{recipe.name}-{next(key for key, value in recipe.sizes.items() if value is config)}"
    file = _FOLDER / f"{spelled}{SUFFIX}"
    if not file.is_file():
        raise UserError(
            f"{name}: there is no sheet for {spelled}{guess(spelled, sheet_names())}; name a sheet of your "
            f"own, a {SUFFIX} file"
        )
    return read_sheet(file, str(name))


def read_sheet(file: Path, where: str) -> Sheet:
    """Read a sheet.

    Raises:
        UserError: it cannot be read, or holds something else; names file and key.
    """
    found = _read(file, where)
    unknown = next((key for key in found if key not in _KEYS), None)
    if unknown is not None:
        raise UserError(f"{where}: {unknown} is no key of a sheet; keys are {', '.join(_KEYS)}")
    model, like = found.get("model"), found.get("like", _COMMON)
    if not isinstance(model, str):
        raise UserError(f'{where}: has no model; write for example model = "llama2-13b"')
    if like not in _SHARED:
        raise UserError(f"{where}: like is {like!r}; it is one of {', '.join(_SHARED)}")
    for key in _TABLES:
        if not isinstance(found.get(key, {}), dict):
            raise UserError(f"{where}: {key} is no table; write [{key}]")
    parts = [_read(_FOLDER / f"{name}{SUFFIX}", name) for name in dict.fromkeys((_COMMON, like))]
    parts.append(found)
    layouts = _joined(part.get("layouts", {}) for part in parts)
    if not layouts or not all(key.isdigit() and isinstance(value, dict) for key, value in layouts.items()):
        raise UserError(f"{where}: has no layouts by number of devices; write a table [layouts.8]")
    steps = {step for part in parts for step in part.get("steps", {})}
    return Sheet(
        model=model,
        flags=_joined(part.get("flags", {}) for part in parts),
        kernels=_joined(part.get("kernels", {}) for part in parts),
        steps={step: _joined(part.get("steps", {}).get(step, {}) for part in parts) for step in steps},
        layouts={int(key): value for key, value in layouts.items()},
        train_from=_count(found, "train-from", where) or 1,
        vocab_size=_count(found, "vocab-size", where),
    )


def _joined(tables: Iterable[Table]) -> dict[str, Any]:
    """Return one table of several; later ones win."""
    return {name: value for table in tables for name, value in table.items()}


def _count(found: Table, key: str, where: str) -> int | None:
    value = found.get(key)
    if value is not None and (type(value) is not int or value < 1):
        raise UserError(f"{where}: {key} is {value!r}; it is a positive whole number")
    return value


def _read(file: Path, where: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise UserError(f"{where}: {reason}; name a sheet, a file in TOML") from error
    except ValueError as error:
        raise UserError(f"{where}: is no TOML ({error}); correct it") from error
    return found
