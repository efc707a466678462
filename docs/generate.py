"""Writes ``docs/reference`` from what the code declares, so that they cannot disagree.

``python docs/generate.py`` writes every page; with ``--check`` it writes nothing, names the pages that are
not up to date and exits with 1. Only the core and the plugins of this repository appear: what else is
installed where the pages are written must not show in them.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from backend_contract_pages import backend_contracts_page
from class_pages import declarations_page, platform_page, records_page, session_page
from contract_pages import npu_contracts_page
from docstrings import docstring_parts, entries, markdown
from feature_pages import features_page
from flag_pages import family_pages, flags_page
from layer_pages import layers_page
from mindspeed_flags import mindspeed_page
from mindspeed_imports import imports_page
from proof_pages import scenarios_page
from tables import code, codes, table

from mindspeed_core import __version__
from mindspeed_core.discovery.entry_points import FEATURES as FEATURE_GROUP
from mindspeed_core.discovery.entry_points import HOSTS, PLATFORMS, Installed, Source
from mindspeed_core.discovery.installed import installed_version
from mindspeed_core.discovery.slots import CORE_SLOTS
from mindspeed_core.discovery.stages import core_stages
from mindspeed_core.feature import PROJECT, Patch
from mindspeed_core.flags.flag_set import flag_set
from mindspeed_core.hooks import API_VERSION, STAGE_MODULES
from mindspeed_core.registry import Registry
from mindspeed_megatron.config_flags import EXCLUDED
from mindspeed_megatron.corrections import CORRECTIONS
from mindspeed_megatron.doctor.supported_versions import (
    NPU_CANN,
    NPU_PYTHON,
    NPU_WITHOUT_CANN,
    PYTHON,
    TABLE,
    TRIALS,
    same_release,
)
from mindspeed_megatron.hosts.megatron_lm.patch_table import (
    ARGUMENT,
    ARGUMENTS,
    ENTRIES,
    ENTRY,
    GLOBAL,
    INSTANCE,
    PATCH,
    PATCHES,
    STARTUP,
    STARTUPS,
)
from mindspeed_megatron.newer_fields import ACTING, newer_fields
from mindspeed_megatron.touch_points.changes import changes
from mindspeed_megatron.touch_points.record import index, known_uses, known_version
from mindspeed_megatron.upstream import megatron_lm_flags
from mindspeed_megatron.upstream.verdicts import NOTED, REFUSED, TRANSLATED, USED
from mindspeed_train.arguments import megatron_lm_answers
from mindspeed_train.arguments.refusals import REFUSALS

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
NOTICE = "<!-- Written by docs/generate.py: change the code it is made from, then run that program. -->"
HOST = "standalone"
STATUSES = (USED, TRANSLATED, NOTED, REFUSED)


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


def stages_of(module: ModuleType) -> list[Callable[..., Any]]:
    """The stages of a module in the order of its source."""
    return [value for value in vars(module).values() if hasattr(value, PROJECT + "_spec")]


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


def compatibility_page(registry: Registry) -> str:
    """The table of versions."""
    lines = [
        "# Compatibility",
        "",
        f"mindspeed-core {__version__}: Python {code(PYTHON)}, hook interface {API_VERSION}.",
        "",
        *table(
            ("distribution", "works with", "tested with", "needed"),
            (
                (
                    code(row.distribution),
                    code(row.versions),
                    ", ".join(row.tested) or "",
                    f"on platform {row.platform}" if row.platform else "always" if row.required else "",
                )
                for row in TABLE
            ),
        ),
        "",
        "## What was run",
        "",
        *table(
            ("platform", "megatron-core", "torch", "Python", "extent"),
            ((code(t.platform), t.megatron_core, t.torch, t.python, t.extent) for t in TRIALS),
        ),
        "",
        "Everything else is not tested and only expected to work: no CUDA device and no NPU runs the suite.",
        "The CUDA platform is written against torch's sources and tested with stand-ins for the device; how",
        "far the NPU platform is tested without an NPU is in [its own page](../npu-conformance.md).",
        "",
        "## On an NPU",
        "",
        "torch_npu has to be of torch's version and made for the CANN of the machine. The builds that its",
        "authors publish for each pair; where nothing stands they state none. Every call of torch_npu in the",
        "core and in the plugins was compared with the schemas and sources of each of these builds; kernels",
        "that a build lacks stand down there (`mindspeed-features ops` says which and why).",
        "",
        *table(
            ("torch", "Python", *(f"CANN {cann}" for cann in NPU_CANN)),
            (
                (torch, python, *(npu_build(torch, builds) for builds in NPU_CANN.values()))
                for torch, python in NPU_PYTHON.items()
            ),
        ),
        "",
        "Of these builds their authors do not state a CANN; every call was compared with them too: "
        + codes(NPU_WITHOUT_CANN)
        + ".",
        "",
        *touch_point_section(),
        "",
        *correction_section(),
        "",
        *field_section(),
        "",
        "## What to do about a difference",
        "",
        "`mindspeed-features doctor` compares what is installed with the first table and says how to mend a",
        "difference. A plugin states its own requirements in its package metadata and in `packages` of each",
        "feature; the plan refuses a feature whose requirement is not met.",
    ]
    return "\n".join(lines)


def touch_point_section() -> list[str]:
    """Count what the project relies on in each recorded megatron-core."""
    _, uses = known_uses()
    rows, before = [], None
    for version in index():
        known = known_version(version).symbols
        changed = "" if before is None else str(len(changes(uses, before, known.get)))
        rows.append((version, str(len(known)), changed))
        before = known
    return [
        "## Touch points",
        "",
        "Every symbol of megatron-core that the core or a plugin imports, calls, subclasses, reads or",
        f"patches: {len(uses)} of them. `nox -s touch_points` reads the wheels of these versions and records",
        "for each symbol whether it is there, what it takes, and the source of what is replaced. A version",
        "that is in no record is compared with the nearest one: `mindspeed-features doctor` names what",
        "changed, a training warns and goes on unless it uses something that changed, and",
        "`--strict-versions` refuses what was not tested.",
        "",
        *table(("megatron-core", "touch points it has", "changed since the row above"), rows),
    ]


def correction_section() -> list[str]:
    """List the faults of megatron-core that are corrected, each with the versions that have it."""
    rows = [
        (code(one.function.removeprefix("megatron.core.")), code(one.versions), one.fault, code(one.module))
        for one in CORRECTIONS.values()
    ]
    return [
        "## Corrections of megatron-core",
        "",
        "A test fails when a recorded version has another source, so that a correction ends with its fault.",
        "",
        *table(("function", "versions with the fault", "fault", "corrected in"), rows),
    ]


def field_section() -> list[str]:
    """List the fields that newer configuration classes have, and what becomes of them."""
    rows = [(code(one.name), one.kind, one.since, field_verdict(one.name)) for one in newer_fields()]
    return [
        "## Fields of newer versions",
        "",
        "Flags are made from the fields of the installed megatron-core; a field that is none says why.",
        "",
        *table(("field", "of", "since", "on the command line"), rows),
    ]


def field_verdict(name: str) -> str:
    """Say what becomes of a field of a newer megatron-core."""
    if name in EXCLUDED:
        return f"no flag: {EXCLUDED[name]}"
    if name in ACTING:
        return f"a flag: {ACTING[name]}"
    refusal = next(refusal for refusal in REFUSALS if refusal.dest == name)
    needed = {"": "", "te": " without TransformerEngine"}.get(refusal.without, f" without {refusal.without}")
    return f"a flag that {'stands down' if refusal.stands_down else 'is refused'}{needed}: {refusal.reason}"


def npu_build(torch: str, builds: Sequence[str]) -> str:
    """The torch_npu of a CANN release that belongs to a torch release; empty when there is none."""
    return codes(build for build in builds if same_release(build, torch))


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


def megatron_lm_page(registry: Registry) -> str:
    """Every training flag of Megatron-LM and what holds for it here."""
    by_option = {o: e for e in flag_set(registry, HOST).entries for o in e.flag.options}
    owners = {option: entry.owner for option, entry in by_option.items()}
    packages = {o: registry.features[name].dist for o, name in owners.items() if name in registry.features}
    adopters = {
        option: registry.features[adoption.owner].dist
        for entry in by_option.values()
        for adoption in entry.adoptions
        for option in adoption.flag.options
        if adoption.owner in registry.features
    }
    flags = {option: entry.flag for option, entry in by_option.items()}
    found = list(megatron_lm_answers.answers(flags, packages, adopters))
    counts = {status: sum(answer.status == status for answer in found) for status in STATUSES}
    lines = [
        "# Megatron-LM's flags",
        "",
        f"Every training flag of Megatron-LM {megatron_lm_flags.megatron_lm_flags()[0]} and its answer here:",
        ", ".join(f"{count} {status}" for status, count in counts.items()) + ".",
        "",
        "*Used* flags do what they do there; the note says which values are refused or change nothing,",
        "and where a default differs. *Translated* ones are read as another flag, and *noted* ones change",
        "nothing: a run says both in one line, and `mindspeed-features plan` or `--explain` why for each.",
        "*Refused* ones end the program before training: without them it would train, save or read",
        "something else.",
    ]
    for status in STATUSES:
        rows = ((code(a.option), a.reason) for a in found if a.status == status)
        lines += ["", f"## {status}", "", *table(("flag", "note"), rows)]
    return "\n".join(lines)


def _platforms(row: Any) -> str:
    if row.elsewhere:
        return f"all but {', '.join(row.elsewhere)}"
    return ", ".join(row.platforms) or "all"


def megatron_lm_stages_page(registry: Registry) -> str:
    """List the function of Megatron-LM behind each stage, and how it is reached."""
    known = [stage.__name__ for name in STAGE_MODULES for stage in stages_of(import_module(name))]
    rows = []
    for stage in known:
        found = [row for row in (*ENTRIES, *STARTUPS, *ARGUMENTS, *PATCHES) if stage in row.stages]
        for row in found:
            rows.append((code(stage), code(row.target), MECHANISMS[row.mechanism], row.reason, row.versions))
        if not found:
            rows.append((code(stage), "", "the core", "called when the session opens", ""))
    own = [row for row in (*ENTRIES, *PATCHES) if not row.stages]
    lines = [
        "# Megatron-LM: stages and functions",
        "",
        "Where each stage happens inside Megatron-LM core_v0.16.1, and by which means. A function is",
        "intercepted only when an active feature implements the stage, or when the host needs it on the",
        "platform in use; entries are intercepted from the import of the adaptor on. The guide is",
        "[Inside Megatron-LM's scripts](../megatron-lm.md).",
        "",
        *table(("stage", "Megatron-LM", "means", "why", "older versions"), rows),
        "",
        "## Without a stage",
        "",
        "What the host itself needs, and where.",
        "",
        *table(
            ("Megatron-LM or torch", "platforms", "why"),
            ((code(row.target), _platforms(row), row.reason) for row in own),
        ),
    ]
    return "\n".join(lines)


def launch_scripts_page(registry: Registry) -> str:
    """The launch scripts of other projects that start as they are, and why the others do not."""
    sources = json.loads((ROOT / "tests" / "launch_scripts" / "accepted.json").read_text(encoding="utf-8"))
    lines = [
        "# Launch scripts of other projects",
        "",
        "Command lines of other projects' own scripts, as `mindspeed-train` reads them with every package of",
        "this repository installed: each flag has a verdict, and the whole is checked for the world that the",
        "script was written for. `python tests/launch_scripts/checked_lines.py` makes the table.",
        "",
    ]
    rows = (
        (
            each["title"],
            number,
            each["before"],
            len(each["accepted"]),
            number - len(each["refused_in_scripts"]),
        )
        for each in sources.values()
        for number in [len(each["accepted"]) + len(each["refused"])]
    )
    heads = "scripts, number, accepted before flags had verdicts, accepted, inside of Megatron-LM's scripts"
    lines += table(tuple(heads.split(", ")), rows)
    for each in sources.values():
        lines += ["", f"## {each['title']}", ""]
        if each["accepted"]:
            lines += ["Accepted: " + ", ".join(map(code, each["accepted"])) + "."]
        if each["refused"]:
            refused = ((code(name), reason) for name, reason in each["refused"].items())
            lines += ["", *table(("refused", "over"), refused)]
        if each["refused_in_scripts"] and each["refused_in_scripts"] != each["refused"]:
            refused = ((code(name), reason) for name, reason in each["refused_in_scripts"].items())
            lines += ["", *table(("refused inside of Megatron-LM's scripts", "over"), refused)]
    return "\n".join(lines)


MECHANISMS = {
    ARGUMENT: "argument of `pretrain`",
    INSTANCE: "attribute of the object",
    GLOBAL: "name in the script",
    PATCH: "intercepted on demand",
    ENTRY: "entry",
    STARTUP: "intercepted until the session opens",
}

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
