"""Record what published builds of torch_npu offer under the names that our sources use.

    pip download --no-deps -d wheels torch_npu==2.9.0.post2 …
    python tools/torch_npu_builds.py wheels

Wheels are read, not imported: schemas of operators lie as text in their libraries, signatures of functions
in their sources. The record is ``builds.json`` of `mindspeed_testing.npu`; for each name it has the argument
names of every form and the builds that have it.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.utils import parse_wheel_filename
from packaging.version import Version

from mindspeed_megatron.devices.torch_npu_uses import api_uses

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "plugins/mindspeed_testing/src/mindspeed_testing/npu/builds.json"
LIBRARIES = ("torch_npu/lib/libtorch_npu.so", "torch_npu/lib/libop_plugin_atb.so")
_OPERATORS = ("torch_npu.npu_", "torch_npu.empty_with", "torch.ops.")
ANY = ["*"]
"""Arguments of a name that takes any, or is a value."""


def used_names() -> list[str]:
    """Return every name of torch_npu that the core or a plugin for users mentions."""
    plugins = [
        path
        for path in (*ROOT.glob("packages/*/src/*"), *ROOT.glob("plugins/*/src/*"))
        if path.name != "mindspeed_testing"
    ]
    return sorted({use.name for use in api_uses((ROOT / "mindspeed_core", *plugins))})


def arguments_in(wheel: Path, names: Iterable[str]) -> dict[str, list[str]]:
    """Return the argument names of every used name that a wheel has."""
    with zipfile.ZipFile(wheel) as archive:
        members = set(archive.namelist())
        libraries = [archive.read(name) for name in LIBRARIES if name in members]
        texts = (text for library in libraries for text in library.split(b"\0"))
        schemas = _schemas(text for text in texts if b") -> " in text)
        sources = {
            name: archive.read(name).decode("utf-8", "replace")
            for name in members
            if name.endswith(".py") and name.startswith("torch_npu/") and "/testing/" not in name
        }
    found = {}
    for name in names:
        arguments = schemas.get(name.rpartition(".")[2]) if name.startswith(_OPERATORS) else None
        if arguments is None:
            arguments = _python(name, sources, libraries)
        if arguments is not None:
            found[name] = arguments
    return found


def _schemas(texts: Iterable[bytes]) -> dict[str, list[str]]:
    """Return the argument names of each operator, of the form that has most."""
    found: dict[str, list[str]] = {}
    for text in texts:
        match = re.fullmatch(rb"(?:npu::|atb::)?(\w+)(?:\.\w+)?\((.*)\) -> .*", text, re.DOTALL)
        if match is not None:
            name, arguments = match[1].decode(), _argument_names(match[2].decode())
            found[name] = max(found.get(name, []), arguments, key=len)
    return found


def _argument_names(form: str) -> list[str]:
    parts = re.sub(r"\[[^\]]*\]", "", form)
    return [part.split("=")[0].split()[-1] for part in parts.split(", ") if part.strip() not in ("", "*")]


def _python(name: str, sources: dict[str, str], libraries: list[bytes]) -> list[str] | None:
    """Return the arguments of a function or class of torch_npu's sources, or of a value ``*``."""
    inner = name.removeprefix("torch_npu.").removeprefix("torch.")
    parts = inner.split(".")
    short = parts[-1]
    if short.startswith("__") or name in ("torch_npu.version", "torch_npu.npu"):
        return ANY
    folder = "torch_npu/npu/" if name.startswith("torch.npu") else "torch_npu/"
    if "profiler" in parts:
        folder = "torch_npu/profiler/"
    if "_C" in parts:
        return ANY if any(parts[-2].encode() in library for library in libraries) else None
    own = {path: text for path, text in sources.items() if path.startswith(folder)}
    for text in own.values():
        if short in text:
            found = _definition(ast.parse(text), parts)
            if found is not None:
                return found
    path = folder + short + ".py"
    if path in sources or f"{folder}{short}/__init__.py" in sources:
        return ANY
    listed = re.compile(rf"^\s*{re.escape(short)}\b|[\"']{re.escape(short)}[\"']", re.MULTILINE)
    return ANY if any(listed.search(text) for text in own.values()) else None


def _definition(tree: ast.Module, parts: list[str]) -> list[str] | None:
    short, owner = parts[-1], parts[-2] if len(parts) > 1 else ""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == short:
            return _signature(node)
        if isinstance(node, ast.ClassDef) and node.name == short:
            made = [
                one
                for one in node.body
                if isinstance(one, ast.FunctionDef) and one.name in ("__init__", "__new__")
            ]
            return _signature(made[-1])[1:] if made else ANY
        if isinstance(node, ast.ClassDef) and node.name == owner:
            for one in node.body:
                targets = one.targets if isinstance(one, ast.Assign) else ()
                if any(isinstance(target, ast.Name) and target.id == short for target in targets):
                    return ANY
    return None


def _signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return names + (ANY if given.vararg or given.kwarg else [])


def record_of(wheels: Iterable[Path]) -> dict[str, object]:
    """Return the record: builds in order, and the forms of each name with the builds that have it."""
    names = used_names()
    builds: dict[str, dict[str, list[str]]] = {}
    for wheel in wheels:
        _, version, _, _ = parse_wheel_filename(wheel.name)
        builds[str(version)] = arguments_in(wheel, names)
    ordered = sorted(builds, key=Version)
    return {"builds": ordered, "names": {name: list(_forms(name, ordered, builds)) for name in names}}


def _forms(
    name: str, ordered: Iterable[str], builds: dict[str, dict[str, list[str]]]
) -> Iterator[dict[str, list[str]]]:
    forms: dict[tuple[str, ...], list[str]] = {}
    for build in ordered:
        if name in builds[build]:
            forms.setdefault(tuple(builds[build][name]), []).append(build)
    for arguments, where in forms.items():
        yield {"arguments": list(arguments), "builds": where}


def main() -> None:
    """Read the wheels of a folder and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheels", type=Path, help="folder with wheels of torch_npu")
    folder: Path = parser.parse_args().wheels
    found = record_of(sorted(folder.glob("torch_npu-*.whl")))
    lines = [f'{{"builds": {json.dumps(found["builds"])},', ' "names": {']
    names = found["names"]
    assert isinstance(names, dict)
    lines.append(",\n".join(f"  {json.dumps(name)}: {json.dumps(forms)}" for name, forms in names.items()))
    RECORD.write_text("\n".join([*lines, " }}"]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
