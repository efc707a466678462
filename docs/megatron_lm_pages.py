"""The pages of Megatron-LM's flags, of its intercepted functions, and of launch scripts."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from tables import code, table

from mindspeed_core.feature import PROJECT
from mindspeed_core.flags.flag_set import flag_set
from mindspeed_core.hooks import STAGE_MODULES
from mindspeed_core.registry import Registry
from mindspeed_megatron.hosts.megatron_lm.interception import (
    ARGUMENT,
    ENTRY,
    GLOBAL,
    INSTANCE,
    PATCH,
    STARTUP,
)
from mindspeed_megatron.hosts.megatron_lm.patch_table import ARGUMENTS, ENTRIES, PATCHES, STARTUPS
from mindspeed_megatron.upstream import megatron_lm_flags
from mindspeed_megatron.upstream.verdicts import NOTED, REFUSED, TRANSLATED, USED
from mindspeed_train.arguments import megatron_lm_answers

ROOT = Path(__file__).resolve().parent.parent
HOST = "standalone"
STATUSES = (USED, TRANSLATED, NOTED, REFUSED)


def stages_of(module: ModuleType) -> list[Callable[..., Any]]:
    """The stages of a module in the order of its source."""
    return [value for value in vars(module).values() if hasattr(value, PROJECT + "_spec")]


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
        *table(("stage", "Megatron-LM", "means", "why", "other versions"), rows),
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
    # Of a script for NPUs the plan with the kernels of NPUs.
    on_npus = {name: {**entry, "npu": True} for name, entry in _outcomes("planned_npu.json").items()}
    planned = _outcomes("planned.json") | on_npus
    trained = _outcomes("trained.json")
    lines = [
        "# Launch scripts of other projects",
        "",
        "Command lines of other projects' own scripts, as `mindspeed-train` reads them with every package of",
        "this repository installed: each flag has a verdict, and the whole is checked for the world that the",
        "script was written for. `python tests/launch_scripts/checked_lines.py` makes the table.",
        "",
        "`plans.py` and `twins.py` beside it go further: dry runs of an accepted script at its full size and",
        "world, and a tiny twin of it that trains three steps like one process without features. The columns",
        "count the scripts for which they were run as they are now, and found nothing wrong;",
        "`nox -s scripts` and `nox -s npu_scripts` run those that have changed since.",
        "",
        "A script does not say how many devices it is for: it is planned on whole machines of eight Ascend",
        "910B3 (64 GiB) or H100 (80 GiB), as few as its sizes and its batch divide into. Where the fullest",
        "rank needs more than its device has, the plan is refused with what is missing: with more ranks,",
        "what data parallelism shards takes less. Plans of scripts for NPUs are made with the kernels of",
        "torch_npu (`--platform fake-npu`) where the table says so, all others with those of CPUs, which",
        "keep more than those of the device where a feature has none for CPUs (flash attention without its",
        "flag, products that communicate). A script of Megatron-FSDP has no plan, since that reads values",
        "while it shards a model, and one that trains nothing has neither plan nor twin.",
        "",
    ]
    rows = (
        (
            each["title"],
            number,
            each["before"],
            len(each["accepted"]),
            number - len(each["refused_in_scripts"]),
            *(
                sum(found.get(f"{source}:{name}", {}).get("verdict") == verdict for name in each["accepted"])
                for found, verdict in ((planned, "ok"), (planned, "lacks"), (trained, "ok"))
            ),
        )
        for source, each in sources.items()
        for number in [len(each["accepted"]) + len(each["refused"])]
    )
    heads = (
        "scripts, number, accepted before flags had verdicts, accepted, inside of Megatron-LM's scripts, "
        "planned at full size, refused by the plan for want of memory, trained as a tiny twin"
    )
    lines += table(tuple(heads.split(", ")), rows)
    for source, each in sources.items():
        lines += ["", f"## {each['title']}", ""]
        if each["accepted"]:
            accepted = (
                (code(name), _plan(planned.get(f"{source}:{name}")), _twin(trained.get(f"{source}:{name}")))
                for name in each["accepted"]
            )
            lines += table(("accepted", "planned at full size", "tiny twin"), accepted)
        if each["refused"]:
            refused = ((code(name), reason) for name, reason in each["refused"].items())
            lines += ["", *table(("refused", "over"), refused)]
        if each["refused_in_scripts"] and each["refused_in_scripts"] != each["refused"]:
            refused = ((code(name), reason) for name, reason in each["refused_in_scripts"].items())
            lines += ["", *table(("refused inside of Megatron-LM's scripts", "over"), refused)]
    return "\n".join(lines)


def _outcomes(name: str) -> dict[str, dict[str, Any]]:
    """Return the outcome of long checks that a record keeps, by script."""
    record = json.loads((ROOT / "tests" / "launch_scripts" / name).read_text(encoding="utf-8"))
    return {script: entry for entry in record.values() for script in entry["scripts"]}


def _plan(outcome: dict[str, Any] | None) -> str:
    """Describe the plan of a script in a few words."""
    if outcome is None:
        return "none"
    kernels = ", kernels of NPUs" if outcome.get("npu") else ""
    ranks, verdict = f"{outcome['ranks']} ranks{kernels}", outcome["verdict"]
    if verdict == "bad":
        return f"{ranks}: fails"
    lacking = f", of which {outcome['lacking']} are missing" if verdict == "lacks" else ""
    return f"{ranks}, {outcome['gibibytes']} GiB{lacking}"


def _twin(outcome: dict[str, Any] | None) -> str:
    """Describe the twin of a script in a few words."""
    if outcome is None:
        return "none"
    return f"{outcome['ranks']} ranks" + (": differs" if outcome["verdict"] == "bad" else "")


MECHANISMS = {
    ARGUMENT: "argument of `pretrain`",
    INSTANCE: "attribute of the object",
    GLOBAL: "name in the script",
    PATCH: "intercepted on demand",
    ENTRY: "entry",
    STARTUP: "intercepted until the session opens",
}
