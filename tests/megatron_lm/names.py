"""Functions of Megatron-LM that the adaptor counts on, looked up in checkouts without importing them.

Usage: `python names.py CHECKOUT...`. Each line says how many of the functions in the adaptor's table a
checkout has, and names those that it lacks. The exit status is 1 when one of them is required.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from mindspeed_megatron.hosts.megatron_lm.patch_table import ENTRIES, PATCHES, STARTUPS

OWN = "megatron."


def main() -> int:
    """Look every function up in every checkout."""
    rows = {row.target: row for row in (*ENTRIES, *STARTUPS, *PATCHES) if row.target.startswith(OWN)}
    status = 0
    for checkout in map(Path, sys.argv[1:]):
        absent = [row for row in rows.values() if not has(checkout, row.target)]
        said = [f"{row.target}{' (required)' if row.required else ''}" for row in absent]
        status |= any(row.required for row in absent)
        print(
            f"{checkout.name}: {len(rows) - len(absent)} of {len(rows)}{', without ' if said else ''}"
            f"{', '.join(said)}"
        )
    return status


def has(checkout: Path, target: str) -> bool:
    """Tell whether a module of a checkout defines a name, or imports it from elsewhere."""
    module, _, name = target.partition(":")
    place = checkout.joinpath(*module.split("."))
    source = next(
        (file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()), None
    )
    return source is not None and _defines(ast.parse(source.read_text(encoding="utf-8")), name.split("."))


def _defines(tree: ast.AST, names: list[str]) -> bool:
    first, *inner = names
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found = any(first == (alias.asname or alias.name) for alias in node.names)
        else:
            found = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == first
            found = found and (not inner or _defines(node, inner))
        if found:
            return True
    return False


if __name__ == "__main__":
    sys.exit(main())
