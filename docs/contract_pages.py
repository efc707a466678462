"""The page of contracts: every use of torch_npu, its kernel's contract, its sources, and a test."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tables import code, codes, table

from mindspeed_megatron.devices.torch_npu_uses import api_uses
from mindspeed_testing.npu.contracts import UNUSED, read_record
from mindspeed_testing.npu.kernels import all_kernels
from mindspeed_testing.npu.kernels.contract import SOCS, Kernel, Rule, Source

ROOT = Path(__file__).resolve().parent.parent
CONFORMANCE = ROOT / "tests" / "npu_conformance"

INTRODUCTION = (
    "# Contracts of NPU calls",
    "",
    "For each operation of torch_npu that the core or a plugin of this repository calls, a *contract* says "
    "from the vendor's published sources what the kernel accepts, computes and leaves unwritten. The value "
    "device (see [NPU code without an NPU](../npu-conformance.md)) refuses a call that breaks a rule, and "
    "computes the others in float64 by formulas of its own; a fake device, which has no numbers, refuses a "
    "call that breaks one about shapes, dtypes, strides or options. Names in the last column are tests that "
    "computed with the contract. A call whose contract is not written says so: what a device does with it is "
    "not known here.",
)


def npu_contracts_page() -> str:
    """Every operation with its contract, then the names that start no kernel."""
    kernels, places = all_kernels(), _places()
    operations = {name: _operation(name) for name in places}
    called = {name: operation for name, operation in operations.items() if operation}
    written = [name for name, operation in called.items() if _written(kernels.get(operation))]
    lines = [*INTRODUCTION, "", f"**{len(written)} of {len(called)} calls have a written contract.**", ""]
    lines += ["## Calls", ""]
    tests = read_record(CONFORMANCE / "contracts.json")
    lines += table(
        ("call", "used in", "contract", "sources", "test"),
        (
            (code(name), codes(places[name]), *_contract(kernels.get(operation), operation, tests))
            for name, operation in sorted(called.items())
        ),
    )
    lines += ["", _unused()]
    inner = sorted(set(kernels) - set(called.values()))
    lines += ["", "## Operations that torch_npu calls itself", ""]
    lines += ["Backward kernels, and what it puts in the place of PyTorch's own operations.", ""]
    lines += table(
        ("operation", "contract", "sources", "test"),
        ((code(name), *_contract(kernels[name], name, tests)) for name in inner),
    )
    lines += ["", "## Rules", ""]
    for name in sorted(kernels):
        lines += [f"### {name}", "", *_rules(kernels[name]), ""]
    lines += ["## Names that start no kernel", ""]
    lines += [
        "The runtime and the profiler: their signatures are recorded in "
        "[schemas.json](../../tests/npu_conformance/schemas.json), and a run compares them.",
        "",
    ]
    others = {name: where for name, where in places.items() if name not in called}
    lines += table(("name", "used in"), ((code(name), codes(others[name])) for name in sorted(others)))
    return "\n".join(lines)


def _unused() -> str:
    """The sentence about kernels that nothing calls."""
    kinds = "; ".join(f"{what} ({codes(names)})" for what, names in UNUSED.items())
    return (
        f"torch_npu 2.13 has more kernels for large models, which nothing here calls: {kinds}. Their "
        "contracts are not written."
    )


def _places() -> dict[str, list[str]]:
    """The files that use each name, relative to the repository."""
    folders = [ROOT / "mindspeed_core", *sorted((*ROOT.glob("packages/*/src"), *ROOT.glob("plugins/*/src")))]
    found: dict[str, set[str]] = defaultdict(set)
    for use in api_uses(folders):
        if "mindspeed_testing" not in use.path.parts:
            found[use.name].add(
                use.path.relative_to(ROOT).as_posix().partition("/src/")[2] or _short(use.path)
            )
    return {name: sorted(paths) for name, paths in found.items()}


def _short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _operation(name: str) -> str:
    """The operation behind a name by its recorded schema; empty where there is none."""
    recorded = json.loads((CONFORMANCE / "schemas.json").read_text(encoding="utf-8"))["names"]
    schemas = [line.partition("(")[0] for line in recorded.get(name, ()) if "::" in line.partition("(")[0]]
    # Some only arrange their arguments for an operation of the same name with an underscore.
    inner = [schema.replace("::", "::_") for schema in schemas]
    return next((s for s in (*schemas, *inner) if s in all_kernels()), schemas[0] if schemas else "")


def _written(kernel: Kernel | None) -> bool:
    return kernel is not None and bool(kernel.sources)


def _contract(kernel: Kernel | None, operation: str, tests: dict[str, str]) -> tuple[str, str, str]:
    if kernel is None or not kernel.sources:
        return "not written", "", code(tests.get(operation, ""))
    parts = [f"{len(kernel.rules)} rules"]
    if kernel.socs != SOCS:
        parts.append(f"on {', '.join(kernel.socs)} only")
    if kernel.unwritten:
        parts.append(f"unwritten: {kernel.unwritten}")
    parts += [f"unexpected: {text}" for text in kernel.differs]
    return "; ".join(parts), _cited(kernel.sources), code(tests.get(operation, ""))


def _cited(found: Iterable[Source]) -> str:
    paths: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for source in found:
        paths[source.repository, source.commit[:8], source.read].append(source.path)
    return "; ".join(
        f"{repository} at {commit}, read {read}: {codes(files)}"
        for (repository, commit, read), files in paths.items()
    )


def _rules(kernel: Kernel) -> list[str]:
    if not kernel.rules:
        return ["Takes every call."]
    return [f"- {rule.text}{_limits(rule)}" for rule in kernel.rules]


def _limits(rule: Rule) -> str:
    limits = [] if rule.socs == SOCS else list(rule.socs)
    limits += ["by numbers"] if rule.of_values else []
    return f" ({', '.join(limits)})" if limits else ""
