"""Import directions of the core and the plugins, imports for type checking and inside functions included."""

from __future__ import annotations

from functools import cache
from importlib.metadata import requires
from pathlib import Path

import grimp
import pytest
from packaging.requirements import Requirement

from mindspeed_core.discovery.cycles import cycles

PLUGINS = sorted(path.parent.name for path in Path(__file__).parents[2].glob("plugins/*/pyproject.toml"))
HOSTS = "mindspeed_core.hosts"
STANDALONE = f"{HOSTS}.standalone"
INTERFACE = f"{STANDALONE}.interface"
"""Names of the standalone host that others may import; the package itself is its declaration."""


@cache
def imports():
    """Return ``(importer, imported)`` for every import among the core and the plugins of this repository."""
    graph = grimp.build_graph("mindspeed_core", *PLUGINS, exclude_type_checking_imports=False, cache_dir=None)
    return sorted(
        (module, imported)
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
    )


def inside(module, package):
    return module == package or module.startswith(f"{package}.")


def edges(importer, imported, *, but=()):
    """Return the imports from one package into another, except those from within or from ``but``."""
    return [
        f"{a} -> {b}"
        for a, b in imports()
        if inside(a, importer)
        and inside(b, imported)
        and not any(inside(a, allowed) for allowed in (imported, *but))
    ]


def test_nothing_imports_the_standalone_host_but_what_trains_with_it():
    assert edges("mindspeed_core", STANDALONE, but=("mindspeed_core.testing",)) == []


def test_proofs_import_no_private_module_of_the_standalone_host():
    used = {edge.partition(" -> ")[2] for edge in edges("mindspeed_core.testing", STANDALONE)}

    assert used <= {INTERFACE, STANDALONE}


@pytest.mark.parametrize("host", ["library", "megatron_lm", "standalone"])
def test_a_host_imports_no_other_host(host):
    others = [f"{HOSTS}.{other}" for other in ("library", "megatron_lm", "standalone") if other != host]

    assert [edge for other in others for edge in edges(f"{HOSTS}.{host}", other)] == []


def test_core_modules_import_no_host():
    # The adaptor is the Megatron-LM host's own entry, which scripts import by this name.
    outside = (HOSTS, "mindspeed_core.testing", "mindspeed_core.megatron_adaptor")

    assert edges("mindspeed_core", HOSTS, but=outside) == []


def test_nothing_imports_the_programs_but_their_entry():
    assert edges("mindspeed_core", "mindspeed_core.cli") == []


def test_instruments_measure_without_the_tools_of_proofs():
    above = ("activation", "cli", "hosts", "launch", "session", "terminal", "testing")

    assert [e for name in above for e in edges("mindspeed_core.instruments", f"mindspeed_core.{name}")] == []


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_plugin_imports_neither_programs_nor_hosts(plugin):
    # Tools train with the standalone host, or read its checkpoints, by the names that it offers.
    offered = [INTERFACE, STANDALONE] if plugin in ("mindspeed_testing", "mindspeed_optim") else []
    hosts = [e for e in edges(plugin, HOSTS) if e.partition(" -> ")[2] not in offered]

    assert edges(plugin, "mindspeed_core.cli") + hosts == []


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_plugin_imports_only_plugins_that_it_requires(plugin):
    required = {Requirement(text).name.replace("-", "_") for text in requires(plugin.replace("_", "-")) or ()}
    others = [other for other in PLUGINS if other not in {plugin, *required}]

    assert [edge for other in others for edge in edges(plugin, other)] == []


def test_the_core_imports_no_plugin():
    assert [edge for plugin in PLUGINS for edge in edges("mindspeed_core", plugin)] == []


def test_no_module_imports_itself_through_others():
    graph = {}
    for importer, imported in imports():
        graph.setdefault(importer, []).append(imported)
        graph.setdefault(imported, [])

    assert [" -> ".join((*cycle, cycle[0])) for cycle in cycles(graph)] == []


def test_imports_inside_functions_and_for_type_checking_are_seen():
    found = set(imports())

    assert ("mindspeed_core.cli.train", "mindspeed_core.launch.worker") in found
    assert ("mindspeed_core.platforms.platform", "mindspeed_core.runtime.patches") in found
