"""Import directions of all distributions, imports for type checking and inside functions included."""

from __future__ import annotations

from functools import cache
from importlib.metadata import requires
from pathlib import Path

import grimp
import pytest
from packaging.requirements import Requirement

from mindspeed_core.discovery.order import cycles

ROOT = Path(__file__).parents[2]
PLUGINS = sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml"))
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
ALL = ("mindspeed_core", *PACKAGES, *PLUGINS)
HOSTS = ("mindspeed_megatron.hosts.library", "mindspeed_megatron.hosts.megatron_lm", "mindspeed_train")
INTERFACE = ("mindspeed_train", "mindspeed_train.interface")
"""The declaration of the standalone host, and the names in it that others may import."""


@cache
def imports(*, typing=True):
    """Return ``(importer, imported)`` for every import among the packages of this repository."""
    graph = grimp.build_graph(*ALL, exclude_type_checking_imports=not typing, cache_dir=None)
    return sorted(
        (module, imported)
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
    )


def inside(module, package):
    return module == package or module.startswith(f"{package}.")


def edges(importer, imported, *, but=(), typing=True):
    """Return the imports from one package into another, except those from within or from ``but``."""
    return [
        f"{a} -> {b}"
        for a, b in imports(typing=typing)
        if inside(a, importer)
        and inside(b, imported)
        and not any(inside(a, allowed) for allowed in (imported, *but))
    ]


def required(package, *, extras):
    """Return the import packages of ours that a distribution requires, itself or with its extras."""
    found = map(Requirement, requires(package.replace("_", "-")) or ())
    return {r.name.replace("-", "_") for r in found if extras or r.marker is None} & {*ALL}


def distributions_of(package):
    """Return what a distribution may import: its requirements, extras included, and theirs."""
    found, waiting = set(), required(package, extras=True)
    while waiting:
        found |= waiting
        waiting = {more for name in waiting for more in required(name, extras=False)} - found
    return found


def test_the_core_imports_no_other_distribution():
    others = [name for name in ALL if name != "mindspeed_core"]

    assert [edge for other in others for edge in edges("mindspeed_core", other, typing=False)] == []


def test_the_core_names_megatron_core_in_types_alone():
    graph = grimp.build_graph(
        "mindspeed_core", include_external_packages=True, exclude_type_checking_imports=True, cache_dir=None
    )

    assert "torch" in graph.modules
    assert "megatron" not in graph.modules


def test_types_of_parts_alone_point_out_of_the_core():
    found = [e for other in ALL if other != "mindspeed_core" for e in edges("mindspeed_core", other)]

    assert {edge.partition(" -> ")[0] for edge in found} <= {"mindspeed_core"}


@pytest.mark.parametrize("package", [*PACKAGES, *PLUGINS])
def test_a_distribution_imports_only_what_it_requires(package):
    others = [other for other in ALL if other not in {package, *distributions_of(package)}]

    assert [edge for other in others for edge in edges(package, other)] == []


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_imports_no_other_host(host):
    assert [edge for other in HOSTS if other != host for edge in edges(host, other)] == []


def test_parts_of_megatron_core_import_no_host():
    entry = ("mindspeed_megatron.hosts", "mindspeed_megatron.megatron_adaptor")

    assert edges("mindspeed_megatron", "mindspeed_megatron.hosts", but=entry) == []


def test_nothing_imports_the_programs():
    assert edges("mindspeed_core", "mindspeed_core.cli") == []


def test_instruments_measure_without_the_tools_of_proofs():
    above = (
        *(f"mindspeed_core.{name}" for name in ("activation", "cli", "session", "terminal")),
        *(f"mindspeed_megatron.{name}" for name in ("hosts", "launch", "doctor", "migrate")),
    )

    assert [edge for name in above for edge in edges("mindspeed_megatron.instruments", name)] == []


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_plugin_imports_neither_programs_nor_hosts(plugin):
    # Tools and proofs train with the standalone host, or read its checkpoints, by the names that it offers.
    toolmakers = ("mindspeed_testing", "mindspeed_optim", "mindspeed_tune", "mindspeed_models")
    offered = INTERFACE if plugin in toolmakers else ()
    hosts = [edge for host in HOSTS for edge in edges(plugin, host)]

    assert (
        edges(plugin, "mindspeed_core.cli")
        + [edge for edge in hosts if edge.partition(" -> ")[2] not in offered]
        == []
    )


def test_no_module_imports_itself_through_others():
    graph = {}
    for importer, imported in imports():
        if importer != "mindspeed_core":
            graph.setdefault(importer, []).append(imported)
            graph.setdefault(imported, [])

    assert [" -> ".join((*cycle, cycle[0])) for cycle in cycles(graph)] == []


def test_imports_inside_functions_and_for_type_checking_are_seen():
    found = set(imports())

    assert ("mindspeed_train.program", "mindspeed_megatron.launch.worker") in found
    assert ("mindspeed_core.platforms.platform", "mindspeed_core.runtime.patches") in found
