"""Writes down which flags a Megatron-LM checkout has, so that the reference can say what holds for each.

``python tools/megatron_lm_flags.py CHECKOUT VERSION`` builds the checkout's argument parser and records facts
alone: option strings, destination, type, number of values, default, choices. The result is
``packages/mindspeed_megatron/src/mindspeed_megatron/upstream/megatron_lm_flags.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TARGET = (
    Path(__file__).resolve().parent.parent
    / "packages"
    / "mindspeed_megatron"
    / "src"
    / "mindspeed_megatron"
    / "upstream"
    / "megatron_lm_flags.json"
)


class Absent:
    """Stands in for packages that Megatron-LM imports beside its arguments and that need not be installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        """Answer for packages that are missing, after every other finder had its turn."""
        from importlib.machinery import ModuleSpec

        if name.partition(".")[0] in ("six", "nltk", "tiktoken", "sentencepiece", "wandb"):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        """Make a module that has any attribute."""
        module = types.ModuleType(spec.name)
        module.__getattr__ = _anything  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing."""


def _anything(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


def parser_of(checkout: Path) -> argparse.ArgumentParser:
    """Return the parser that the checkout's programs use."""
    sys.path.insert(0, str(checkout))
    sys.meta_path.append(Absent())  # type: ignore[arg-type]
    # The package's own __init__ imports the whole trainer; its modules can be had without it.
    package = types.ModuleType("megatron.training")
    package.__path__ = [str(checkout / "megatron" / "training")]
    package.__getattr__ = _anything  # type: ignore[method-assign]
    sys.modules["megatron.training"] = package
    from importlib import import_module

    arguments = import_module("megatron.training.arguments")
    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_megatron_arguments(parser)
    return parser


def facts(parser: argparse.ArgumentParser) -> Iterator[dict[str, Any]]:
    """Return one record per flag, in the parser's order."""
    for action in parser._actions:
        if not action.option_strings or action.dest == "help":
            continue
        record: dict[str, Any] = {"options": list(action.option_strings), "dest": action.dest}
        if action.nargs == 0:
            record["value"] = "switch"
            record["sets"] = "either" if _has_negation(action) else bool(action.const)
        else:
            record["value"] = getattr(action.type, "__name__", "str")
            if action.nargs is not None:
                record["nargs"] = action.nargs
        for name in ("default", "choices"):
            value = getattr(action, name)
            if name == "choices" and value is not None:
                value = [getattr(choice, "name", choice) for choice in value]
            if value is not None:
                record[name] = value if _plain(value) else str(getattr(value, "name", value))
        yield record


def _has_negation(action: argparse.Action) -> bool:
    return isinstance(action, argparse.BooleanOptionalAction)


def _plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    return isinstance(value, (bool, int, float, str))


def main(arguments: list[str]) -> int:
    """Write the table."""
    if len(arguments) != 2:
        print("usage: python tools/megatron_lm_flags.py CHECKOUT VERSION", file=sys.stderr)
        return 2
    records = list(facts(parser_of(Path(arguments[0]))))
    lines = ",\n".join("  " + json.dumps(record) for record in records)
    TARGET.write_text(
        f'{{"version": {json.dumps(arguments[1])}, "flags": [\n{lines}\n]}}\n', encoding="utf-8"
    )
    print(f"{len(records)} flags written to {TARGET.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
