"""The dataset files of a run: the blends of ``--data-path`` and its relatives.

One blend may serve all splits (``--data-path``, ``--data-args-path``; ``--split`` divides it), or each split
has its own (``--train-data-path`` …, ``--per-split-data-args-path``). Read here once, without torch, so that
a wrong list is refused before anything starts.
"""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_core.errors import ArgumentError, NamedFileError
from mindspeed_train.arguments.errors import argument_error, option
from mindspeed_train.named_files import read_named_file

SPLITS = ("train", "validation", "test")

_PER_SPLIT = ("train_data_path", "valid_data_path", "test_data_path")
_KEYS = ("train", "valid", "test")
_FORM = 'an object such as {"train": ["1", "PREFIX"], "valid": ["1", "PREFIX"]}'


@dataclass(frozen=True)
class Blend:
    """Datasets that are mixed.

    Attributes:
        prefixes: paths of ``.bin`` / ``.idx`` pairs without suffix.
        weights: share of each dataset, or None for shares by length, without repetition.
        flag: where it was given, for errors.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None
    flag: str

    @property
    def pair(self) -> tuple[list[str], list[float] | None]:
        """Return prefixes and weights in the form that megatron-core takes."""
        return list(self.prefixes), None if self.weights is None else list(self.weights)


@dataclass(frozen=True)
class Sources:
    """The sources of samples; all None with ``--mock-data``.

    Attributes:
        shared: one blend for all splits, divided by ``--split``.
        per_split: a blend, or None for no data, for train, validation and test each.
    """

    shared: Blend | None = None
    per_split: tuple[Blend | None, Blend | None, Blend | None] | None = None

    @property
    def made_up(self) -> bool:
        """Return whether no file is read at all."""
        return self.shared is None and self.per_split is None

    def blend(self, split: int) -> Blend | None:
        """Return the blend that a split (0 train, 1 validation, 2 test) is cut from."""
        return self.shared if self.per_split is None else self.per_split[split]

    def flag_of(self, prefix: str) -> str:
        """Return where a dataset was given."""
        blends = [self.shared] if self.per_split is None else list(self.per_split)
        return next(blend.flag for blend in blends if blend and prefix in blend.prefixes)

    def prefixes(self) -> tuple[str, ...]:
        """Return every dataset once, in the order in which they are given."""
        blends = [self.shared] if self.per_split is None else list(self.per_split)
        return tuple(dict.fromkeys(prefix for blend in blends if blend for prefix in blend.prefixes))


def data_sources(args: Namespace) -> Sources:
    """Read the flags, and the files they name.

    Raises:
        ArgumentError: flags contradict each other, or a list makes no sense.
        DataError: a file with a list cannot be read.
    """
    flags = ("data_path", "data_args_path", *_PER_SPLIT, "per_split_data_args_path")
    given = [name for name in flags if getattr(args, name, None)]
    if args.mock_data:
        if given:
            raise ArgumentError(
                "--mock-data", None, f"makes up its samples, {option(given[0])} is given too", "keep one"
            )
        return Sources()
    one_per_split = [name for name in given if name in _PER_SPLIT]
    kinds = [name for name in given if name not in _PER_SPLIT] + one_per_split[:1]
    if len(kinds) > 1:
        reason = f"{option(kinds[1])} is given too"
        raise argument_error(args, option(kinds[0]), reason, "say in one way where the data is")
    if not kinds:
        remedy = "name a dataset there or in --train-data-path, or use --mock-data"
        raise ArgumentError("--data-path", None, "no data to train on", remedy)
    if kinds[0] == "data_path":
        return Sources(parse_blend(args.data_path))
    if kinds[0] == "data_args_path":
        words = _read("--data-args-path", args.data_args_path).split()
        if not words:
            raise NamedFileError("--data-args-path", args.data_args_path, "is empty", "name a dataset in it")
        return Sources(parse_blend(words, f"--data-args-path {args.data_args_path}"))
    if kinds[0] == "per_split_data_args_path":
        sources = Sources(per_split=_per_split_file(args.per_split_data_args_path))
    else:
        blends = [
            parse_blend(words, option(name)) if (words := getattr(args, name)) else None
            for name in _PER_SPLIT
        ]
        sources = Sources(per_split=(blends[0], blends[1], blends[2]))
    if sources.blend(0) is None and not getattr(args, "skip_train", False):
        reason = "the other splits have data, training has none"
        if kinds[0] == "per_split_data_args_path":
            named = args.per_split_data_args_path
            raise NamedFileError("--per-split-data-args-path", named, reason, "name a dataset for 'train'")
        raise ArgumentError("--train-data-path", None, reason, "name a dataset")
    return sources


def parse_blend(words: Sequence[str], flag: str = "--data-path") -> Blend:
    """Read the prefixes, or pairs of weight and prefix, that were given with ``flag``.

    Raises:
        ArgumentError: it is empty, or weights and prefixes do not alternate.
    """
    if not words:
        raise ArgumentError(flag, None, "no data to train on", "name a dataset, or use --mock-data")
    weights = [_number(word) for word in words[::2]]
    if len(words) == 1 or all(weight is None for weight in weights):
        return Blend(tuple(words), None, flag)
    shown = " ".join(words) if len(words) <= 8 else " ".join([*words[:8], "…"])
    if len(words) % 2 or any(weight is None for weight in weights):
        raise ArgumentError(
            flag, shown, "weights and prefixes do not alternate", "give 'weight prefix' pairs"
        )
    positive = tuple(weight for weight in weights if weight is not None and weight > 0)
    if len(positive) < len(weights):
        raise ArgumentError(flag, shown, "a weight is not above zero", "leave that dataset out")
    return Blend(tuple(words[1::2]), positive, flag)


def parse_split(split: str) -> tuple[float, float, float]:
    """Read ``--split``: shares of train, validation and test that sum to 1.

    Raises:
        ArgumentError: it is not one to three numbers, or all are zero.
    """
    parts = [_number(part) for part in re.split(r"[,/\s]+", split.strip())]
    numbers = [part for part in parts if part is not None and part >= 0]
    if len(numbers) != len(parts) or not 1 <= len(numbers) <= 3 or sum(numbers) == 0:
        raise ArgumentError(
            "--split", split, "is not the shares of train, validation and test", "write for example 969,30,1"
        )
    numbers += [0.0] * (3 - len(numbers))
    total = sum(numbers)
    return numbers[0] / total, numbers[1] / total, numbers[2] / total


def _per_split_file(path: str) -> tuple[Blend | None, Blend | None, Blend | None]:
    name = "--per-split-data-args-path"
    flag = f"{name} {path}"
    try:
        content: Any = json.loads(_read(name, path))
    except (ValueError, RecursionError) as error:
        raise NamedFileError(name, path, f"is not JSON ({error})", f"write {_FORM}") from error
    if not isinstance(content, dict) or set(content) - set(_KEYS):
        reason = f"is not an object with the keys {', '.join(_KEYS)}"
        raise NamedFileError(name, path, reason, f"write {_FORM}")
    blends: list[Blend | None] = []
    for key in _KEYS:
        words = content.get(key)
        if isinstance(words, str):
            words = words.split()
        if words is not None and not isinstance(words, list):
            reason = f"{key!r} is neither text nor a list"
            raise NamedFileError(name, path, reason, "write 'weight prefix' pairs")
        blends.append(parse_blend([str(word) for word in words], f"{flag} ({key})") if words else None)
    return blends[0], blends[1], blends[2]


def _read(flag: str, path: str) -> str:
    content = read_named_file(flag, path, "check the path")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NamedFileError(flag, path, f"is not text ({error})", "write it in UTF-8") from error


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
