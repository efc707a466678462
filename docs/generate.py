"""Writes ``docs/reference`` from what the code declares, so that they cannot disagree.

``python docs/generate.py`` writes every page; with ``--check`` it writes nothing, names the pages that are
not up to date and exits with 1. Only the core and the plugins of this repository appear: what else is
installed where the pages are written must not show in them.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from backend_contract_pages import backend_contracts_page
from class_pages import declarations_page, platform_page, records_page, session_page
from compatibility_page import compatibility_page
from contract_pages import npu_contracts_page
from docstrings import docstring_parts, entries, markdown
from feature_pages import features_page
from flag_pages import family_pages, flags_page
from layer_pages import layers_page
from megatron_lm_pages import launch_scripts_page, megatron_lm_page, megatron_lm_stages_page, stages_of
from mindspeed_flags import mindspeed_page
from mindspeed_imports import imports_page
from proof_pages import scenarios_page
from tables import code, codes, table

from mindspeed_core.discovery.entry_points import FEATURES as FEATURE_GROUP
from mindspeed_core.discovery.entry_points import HOSTS, PLATFORMS, Installed, Source
from mindspeed_core.discovery.installed import installed_version
from mindspeed_core.discovery.slots import CORE_SLOTS
from mindspeed_core.discovery.stages import core_stages
from mindspeed_core.feature import PROJECT, Patch
from mindspeed_core.hooks import API_VERSION, STAGE_MODULES
from mindspeed_core.registry import Registry

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
NOTICE = "<!-- Written by docs/generate.py: change the code it is made from, then run that program. -->"
HOST = "standalone"


def tree_registry() -> Registry:
    """The features, hosts and platforms of this repository.

    Raises:
        SystemExit: a plugin of the repository is not installed, or broken.
    """
    plugins = {
        path.parent.name.replace("_", "-")
        for path in (*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml"))
    }

    def ours(group: str) -> list[Source]:
        return [
            source for source in Installed().sources(group) if source.dist in {"mindspeed-core", *plugins}
        ]

    missing = {name for name in plugins if not installed_version(name)}
    if missing:
        raise SystemExit(f"not installed here: {', '.join(sorted(missing))}; pip install -e plugins/NAME")
    registry = Registry(
        [(source, list(source.load())) for source in ours(FEATURE_GROUP)],
        platforms=ours(PLATFORMS),
        hosts=ours(HOSTS),
    )
    if registry.broken:
        raise SystemExit("\n".join(str(broken) for broken in registry.broken))
    return registry


def stage_defaults(registry: Registry) -> dict[str, Path]:
    """The file that holds the host's default of each stage, found without importing it."""
    found: dict[str, Path] = {}
    for module in registry.host(HOST).stages:
        file = module.replace(".", "/") + ".py"
        path = next(root / file for root in (ROOT, *ROOT.glob("packages/*/src")) if (root / file).is_file())
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and any(
                "hookimpl" in ast.unparse(decorator) for decorator in node.decorator_list
            ):
                found[node.name] = path
    return found


def link(path: Path, text: str = "") -> str:
    """A link from a reference page to a file of the repository."""
    relative = path.relative_to(ROOT).as_posix()
    return f"[{text or relative}](../../{relative})"


def stages_page(registry: Registry) -> str:
    """Every stage: when it runs, what it offers, what it returns, who implements it."""
    modules = [import_module(name) for name in STAGE_MODULES]
    usual = common_arguments()
    defaults = stage_defaults(registry)
    lines = ["# Stages", "", f"The hook interface, version {API_VERSION}.", ""]
    lines.append(markdown(inspect.cleandoc(import_module("mindspeed_core.hooks").__doc__ or "")))
    lines += [
        "",
        "The types of arguments and results: [records](records.md), [session](session.md),",
        "[layer specifications](layer-specs.md), [platform](platform.md).",
    ]
    for module in modules:
        name = module.__name__.rpartition(".")[2]
        lines += ["", f"## {name}", "", inspect.cleandoc(module.__doc__ or "")]
        for stage in stages_of(module):
            lines += ["", *stage_lines(stage, registry, defaults, usual)]
    return "\n".join(lines)


def common_arguments() -> dict[str, str]:
    """The meanings of the arguments that the docstring of `mindspeed_core.hooks` gives for all stages."""
    found: dict[str, str] = {}
    lines = re.findall(r"^- (``.+``): (.+)", import_module("mindspeed_core.hooks").__doc__ or "", re.M)
    for names, meaning in lines:
        found |= dict.fromkeys(re.findall(r"``(\w+)``", names), markdown(meaning))
    return found


def stage_lines(
    stage: Callable[..., Any], registry: Registry, defaults: dict[str, Path], usual: dict[str, str]
) -> list[str]:
    """One stage."""
    prose, sections = docstring_parts(stage.__doc__ or "")
    signature = inspect.signature(stage)
    meanings = usual | dict(entries(sections.get("Args", "")))
    lines = [f"### {stage.__name__}", "", prose, ""]
    lines += table(
        ("argument", "type", "meaning"),
        ((code(n), code(p.annotation), meanings.get(n, "")) for n, p in signature.parameters.items()),
    )
    returned = code(str(signature.return_annotation).removesuffix(" | Any"))
    meaning = markdown(" ".join(sections.get("Returns", "").split()))
    lines += ["", f"Returns {returned}: {meaning}" if meaning else f"Returns {returned}."]
    for error, when in entries(sections.get("Raises", "")):
        lines += ["", f"Raises {code(error)}: {when}"]
    if not getattr(stage, PROJECT + "_spec")["firstresult"]:
        lines += ["", "Collects the result of every implementation."]
    present = core_stages()[stage.__name__]
    facts = [f"Since {present.since}"]
    facts += [f"{code(argument)} since {version}" for argument, version in present.added.items()]
    if stage.__name__ in defaults:
        facts.append(f"default: {link(defaults[stage.__name__])}")
    by = [name for name, record in registry.features.items() if stage.__name__ in record.cls.hooks()]
    if by:
        facts.append(f"features: {codes(by)}")
    return [*lines, "", "; ".join(facts)]


def slots_page(registry: Registry) -> str:
    """Every slot and who fills it."""
    core = {slot.name for slot in CORE_SLOTS}
    rows = []
    for name, slot in sorted(registry.slots.items(), key=lambda item: (item[0] not in core, item[0])):
        by = [other for other, record in registry.features.items() if name in record.cls.slots]
        owner = "the core" if name in core else "a plugin"
        rows.append((code(name), slot.summary, owner, "yes" if slot.exclusive else "no", codes(by)))
    lines = [
        "# Slots",
        "",
        "Roles of a training run. Two active features on one exclusive slot exclude each other; a plugin",
        "declares further slots with `Slot` among its declarations.",
        "",
        *table(("slot", "filling it means deciding", "named by", "exclusive", "filled by"), rows),
    ]
    return "\n".join(lines)


def patches_page(registry: Registry) -> str:
    """Every symbol of another package that is changed, by owner and reason."""
    lines = [
        "# Patches",
        "",
        "Symbols of torch and megatron-core that a session changes while it is open. Closing it puts the",
        "original objects back. `mindspeed-features patches` lists those of everything that is installed.",
    ]
    lines += patch_lines("Platform cpu", registry.platform("cpu")().patches())
    lines += patch_lines(f"Host {HOST}", registry.host(HOST).patches)
    for name, record in registry.features.items():
        if record.cls.patches:
            lines += patch_lines(f"Feature {name}", record.cls.patches)
    if not any(record.cls.patches for record in registry.features.values()):
        lines += ["", "## Features", "", "No feature of this repository patches anything."]
    return "\n".join(lines)


def patch_lines(title: str, patches: Sequence[Patch]) -> list[str]:
    """The patches of one owner, those with the same reason in one row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for patch in patches:
        rows.setdefault((patch.reason, patch.kind), []).append(patch.target)
    lines = ["", f"## {title}", "", f"{len(patches) or 'No'} patches."]
    if rows:
        body = ((why, kind, len(found), codes(found)) for (why, kind), found in rows.items())
        lines += ["", *table(("reason", "kind", "number", "targets"), body)]
    return lines


PAGES: dict[str, Callable[[Registry], str]] = {
    "stages": stages_page,
    "features": features_page,
    "flags": flags_page,
    "compatibility": compatibility_page,
    "slots": slots_page,
    "patches": patches_page,
    "megatron-lm-flags": megatron_lm_page,
    "megatron-lm-stages": megatron_lm_stages_page,
    "mindspeed-flags": mindspeed_page,
    "mindspeed-imports": imports_page,
    "launch-scripts": launch_scripts_page,
    "declarations": lambda registry: declarations_page(),
    "records": lambda registry: records_page(),
    "session": lambda registry: session_page(),
    "layer-specs": lambda registry: layers_page(),
    "platform": lambda registry: platform_page(),
    "scenarios": scenarios_page,
    "backend-contracts": lambda registry: backend_contracts_page(),
    "npu-contracts": lambda registry: npu_contracts_page(),
}


def render() -> dict[Path, str]:
    """Every page by its path."""
    registry = tree_registry()
    texts = {name: page(registry) for name, page in PAGES.items()} | family_pages(registry)
    return {REFERENCE / f"{name}.md": f"{NOTICE}\n\n{text}\n" for name, text in texts.items()}


def unwritten(pages: Mapping[Path, str]) -> list[Path]:
    """Pages in the folder of generated pages that nothing writes any more."""
    return sorted({*REFERENCE.rglob("*.md")} - set(pages))


def stale(pages: Mapping[Path, str]) -> list[Path]:
    """Pages that differ from what the code says now, and pages that nothing writes."""
    differing = [
        path for path, text in pages.items() if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    return differing + unwritten(pages)


def main(arguments: Sequence[str]) -> int:
    """Write or check the pages; the exit status."""
    if arguments not in ([], ["--check"]):
        print("usage: python docs/generate.py [--check]", file=sys.stderr)
        return 2
    pages = render()
    if arguments:
        found = stale(pages)
        for path in found:
            print(f"{path.relative_to(ROOT)} is not up to date; run python docs/generate.py", file=sys.stderr)
        return 1 if found else 0
    for path in unwritten(pages):
        path.unlink()
    for path, text in pages.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
