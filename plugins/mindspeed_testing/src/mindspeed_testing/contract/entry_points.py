"""Rules of the contract about what a distribution announces: metadata, loading, platforms, hosts, commands.

A rule is a function that yields one sentence for each thing that is wrong; a sentence says what to change.
Nothing here loads torch.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.metadata import distribution
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mindspeed_core.discovery.entry_points import (
    COMMANDS,
    FEATURES,
    HOSTS,
    PLATFORMS,
    TRAIN_COMMANDS,
    Source,
    describe,
    iterate,
    load_object,
)
from mindspeed_core.discovery.host import DEFAULT_HOST
from mindspeed_core.discovery.stages import wanted_arguments
from mindspeed_core.errors import UserError
from mindspeed_core.feature import PROJECT, ExtensionPoint, StageSpecs
from mindspeed_core.hooks.versions import parsed
from mindspeed_core.platforms.platform import Availability, Platform
from mindspeed_core.registry import RegistryError
from mindspeed_core.terminal.errors import TRACEBACK
from mindspeed_testing.contract.rules import Check, Contract, hold

HEAVY = ("torch", "torch_npu", "megatron.core", "numpy", "pluggy", "triton")
"""Packages that loading a declaration must not import."""


def checks(contract: Contract) -> list[Check]:
    """Return the checks of this module."""
    keep = partial(hold, written_for=contract.written_for)
    found = [Check(name, contract.dist, partial(keep, rule, contract)) for name, rule in RULES.items()]
    for group, name, rule in (
        (PLATFORMS, "platform-declared", _platform),
        (HOSTS, "host-declared", _host),
    ):
        found += [
            Check(name, source.name, partial(keep, rule, contract, source.name))
            for source in contract.sources(group)
        ]
    for group, program in ((COMMANDS, ""), (TRAIN_COMMANDS, "mindspeed-train ")):
        found += [
            Check("command-declared", program + source.name, partial(keep, _command, contract, source, group))
            for source in contract.sources(group)
        ]
    return found


def _loads(contract: Contract) -> Iterator[str]:
    """Check that everything the distribution announces loads and is declared soundly."""
    for broken in contract.registry.broken:
        if broken.dist == contract.dist:
            subject = f"feature {broken.feature}" if broken.feature else f"entry point {broken.entry_point}"
            yield f"{subject} is broken: {broken.error}"


def _requires_the_core(contract: Contract) -> Iterator[str]:
    """Check that its metadata requires the core."""
    wanted = [Requirement(text) for text in distribution(contract.dist).requires or ()]
    core = [found for found in wanted if canonicalize_name(found.name) == "mindspeed-core"]
    if not core and contract.dist != "mindspeed-core":
        yield 'its metadata does not require the core: dependencies = ["mindspeed-core>=…"] in pyproject.toml'
    for found in core:
        if not found.specifier:
            yield f"it requires {found} of any version; say which versions it was tested with"


_WATCH = """
import json, sys, traceback
paths, targets, heavy = json.loads(sys.argv[1])
sys.path[:] = paths
found = {}

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in heavy and name not in found:
            frames = [f for f in traceback.extract_stack()[:-1] if "importlib" not in f.filename]
            found[name] = f"{frames[-1].filename}:{frames[-1].lineno}"

sys.meta_path.insert(0, Watch())
from mindspeed_core.discovery.entry_points import load_object

for value in targets:
    flags = getattr(load_object(value), "flags", None)
    if isinstance(flags, str) and flags:
        load_object(flags)()
print("FOUND" + json.dumps({name: found[name] for name in heavy if name in sys.modules}))
"""


def _light(contract: Contract) -> Iterator[str]:
    """Check that loading declarations, platforms and hosts imports neither torch nor megatron."""
    targets = [s.value for group in (FEATURES, PLATFORMS, HOSTS) for s in contract.sources(group)]
    request = json.dumps([sys.path, targets, HEAVY])
    done = subprocess.run(
        [sys.executable, "-c", _WATCH, request], capture_output=True, text=True, timeout=120, check=False
    )
    answer = next((line for line in done.stdout.splitlines() if line.startswith("FOUND")), "")
    if not answer:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield f"its entry points cannot be imported in a fresh process: {last}"
        return
    for name, where in json.loads(answer.removeprefix("FOUND")).items():
        yield (
            f"loading its declarations imports {name} ({where}); import it inside the hook that needs it, so "
            "that listing and planning stay fast everywhere"
        )


def _hook_interface(contract: Contract) -> Iterator[str]:
    """Check that its stated hook interface has every stage and argument it uses."""
    for record in contract.features():
        for name, function in record.cls.hooks().items():
            needed = contract.registry.stages[name].needed(wanted_arguments(function))
            if parsed(needed) > parsed(record.hook_api):
                yield (
                    f"{record.cls.name} uses stage {name!r} of hook interface {needed}, but its plugin "
                    f"states HookApi({record.hook_api!r}): state {needed!r}"
                )


def _extensible(contract: Contract) -> Iterator[str]:
    """Check that stages and extension points it publishes are what its declarations say."""
    for source in contract.sources(FEATURES):
        try:
            declared = iterate(source.load())
        except Exception:
            # The rule about loading says what is wrong.
            continue
        for item in declared:
            if isinstance(item, StageSpecs):
                yield from _stage_specs(item)
            elif isinstance(item, ExtensionPoint):
                yield from _extension_point(item)


def _stage_specs(specs: StageSpecs) -> Iterator[str]:
    try:
        module = import_module(specs.module)
    except Exception as error:
        yield f"StageSpecs names the module {specs.module}: {describe(error)}"
        return
    specified = {n: v for n, v in vars(module).items() if hasattr(v, PROJECT + "_spec")}
    for name in specs.stages:
        if name not in specified:
            yield f"{specs.module} has no @hookspec {name}, which StageSpecs announces"
        elif getattr(specified[name], PROJECT + "_spec")["firstresult"] is (name in specs.collecting):
            yield f"stage {name}: firstresult and StageSpecs(collecting=...) do not agree"
        elif not inspect.getdoc(specified[name]):
            yield f"stage {name} has no docstring; it is the manual of whoever implements it"
    for name in sorted(specified.keys() - {*specs.stages}):
        if specified[name].__module__ == specs.module:
            yield f"{specs.module} has the @hookspec {name}, which StageSpecs does not announce"


def _extension_point(point: ExtensionPoint) -> Iterator[str]:
    if not point.summary.strip():
        yield f"extension point {point.name} has no summary; mindspeed-features list prints it"
    if point.check:
        try:
            found = load_object(point.check)
        except Exception as error:
            yield f"extension point {point.name}: its check {point.check}: {describe(error)}"
            return
        if not callable(found):
            yield f"extension point {point.name}: its check {point.check} is not a function"


RULES: dict[str, Callable[[Contract], Iterator[str]]] = {
    "loads": _loads,
    "requires-the-core": _requires_the_core,
    "declarations-are-light": _light,
    "hook-interface": _hook_interface,
    "extensible-as-declared": _extensible,
}


_OWN_METHODS = ("probe", "memory_allocated", "peak_memory", "total_memory")


def _platform(contract: Contract, name: str) -> Iterator[str]:
    """Check that a platform loads, answers `probe` and implements what the base class cannot."""
    try:
        platform = contract.registry.platform(name)
    except RegistryError as error:
        yield str(error)
        return
    if platform.name != name:
        yield f"its class has the name {platform.name!r}, its entry point {name!r}; they must be the same"
    if platform.like and platform.like not in contract.registry.platform_names():
        yield f"it is like {platform.like!r}, which is no installed platform"
    yield from (
        f"it does not implement {method}()"
        for method in _OWN_METHODS
        if getattr(platform, method).__qualname__ == f"Platform.{method}"
    )
    if platform.probe.__qualname__ != "Platform.probe":
        yield from _probe(platform)


def _probe(platform: type[Platform]) -> Iterator[str]:
    try:
        answer: Any = platform.probe()
    except Exception as error:
        yield f"probe() raises {type(error).__name__}: {error}; it answers, also where nothing is installed"
        return
    if not isinstance(answer, Availability):
        yield f"probe() returns {answer!r}, not an Availability"
    elif not answer.reason.strip():
        yield "probe() gives no reason; --platform auto prints it"


def _host(contract: Contract, name: str) -> Iterator[str]:
    """Check that a host and its flags load."""
    try:
        host = contract.registry.host(name)
        contract.registry.host_flags(name)
    except UserError as error:
        yield str(error)
        return
    if host.name != name:
        yield f"its declaration has the name {host.name!r}, its entry point {name!r}; they must be the same"
    if not host.summary.strip():
        yield "its declaration has no summary"


def _command(contract: Contract, source: Source, group: str) -> Iterator[str]:
    """Check that a sub-command of either program is a click command with help, and can be reached."""
    import click

    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", source.name):
        yield f"its name {source.name!r} is no word of lower-case letters, digits and dashes"
    if group == TRAIN_COMMANDS and source.name in (*contract.registry.host(DEFAULT_HOST).commands, "help"):
        yield f"mindspeed-train has a command {source.name!r} of its own, which runs instead; rename it"
    try:
        command = source.load()
    except Exception as error:
        yield f"it cannot be loaded: {type(error).__name__}: {error}"
        return
    if not isinstance(command, click.Command):
        yield f"{source.value} is {type(command).__name__}, not a click command"
    elif not (command.help or "").strip():
        yield "it has no help: give its function a docstring"
    elif any(TRACEBACK in parameter.opts for parameter in command.params):
        yield f"its option {TRACEBACK} never reaches it: the programs take that off every command line"
