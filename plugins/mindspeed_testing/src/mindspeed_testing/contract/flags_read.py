"""The rule that no flag is declared which nothing reads.

A flag is read where a method of the feature asks the arguments for it, which is watched, or where a module of
its package names the attribute. `Feature.unread` may say instead that it has no effect.
"""

from __future__ import annotations

import ast
from argparse import Namespace
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mindspeed_core.discovery.host import DEFAULT_HOST
from mindspeed_core.flags.flag_set import flag_set
from mindspeed_core.registry import FeatureRecord
from mindspeed_core.resolver.index import index_of
from mindspeed_core.resolver.request import failure
from mindspeed_testing.contract.rules import Contract
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.proof_files import flags_with_files

FLAGS_READ = "1.3"
"""The hook interface whose packages are held to the rule."""


class _Watched(Namespace):
    """Arguments that remember what they were asked for."""

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            object.__getattribute__(self, "_asked").add(name)
        return super().__getattribute__(name)


def unread_flags(contract: Contract, record: FeatureRecord) -> Iterator[str]:
    """Check that something reads every flag that no host has."""
    feature, readers = record.cls, index_of(contract.registry, DEFAULT_HOST).readers
    own = [flag for flag in feature.flags if flag.dest in readers]
    if not own:
        return
    asked, excused, failing = _asked_for(contract, record)
    yield from failing
    package = feature.__module__.partition(".")[0]
    for flag in own:
        if flag.dest in asked or flag.dest in names_in(package) or {*flag.options} & excused:
            continue
        yield (
            f"nothing in {package} reads args.{flag.dest}, so {flag.name} has no effect: read it, drop it, "
            "or say with unread() why it has none"
        )


def _asked_for(contract: Contract, record: FeatureRecord) -> tuple[set[str], set[str], list[str]]:
    """Return what a declaration asks arguments for, the flags it says are not read, and what fails."""
    feature = record.cls
    asked: set[str] = set()
    excused: set[str] = set()
    failing: dict[str, None] = {}
    known = flag_set(contract.registry, DEFAULT_HOST)
    lines = [((), ()), *((scenario.flags, scenario.files) for scenario in feature.verify)]
    for line, files in lines:
        with flags_with_files(line, files) as filled:
            args = known.parse(training_flags(filled, 1, contract.registry)).args
            watched = _Watched(**{**vars(args), "_asked": asked, "platform": contract.platform})
            for method in (feature.enabled, feature.idle, feature.presets, feature.validate, feature.notes):
                try:
                    method(watched)
                except (Exception, SystemExit):
                    # Other rules report it.
                    continue
            try:
                excused |= feature.unread(args).keys()
            except (Exception, SystemExit) as error:
                if line:
                    failing[failure(record, "unread()", error)] = None
    return asked, excused, list(failing)


@lru_cache(maxsize=64)
def names_in(package: str) -> frozenset[str]:
    """Return every attribute, argument and text in the modules of a package."""
    spec = find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = [path for folder in folders for path in sorted(Path(folder).rglob("*.py"))]
    if not folders and spec is not None and spec.origin:
        files = [Path(spec.origin)]
    found: set[str] = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return frozenset(found)
