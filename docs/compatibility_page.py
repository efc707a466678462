"""The page of versions and builds that are known to work, from records of touch points and contracts."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from pathlib import Path

from newer_parts import PARTS
from tables import code, codes, table

from mindspeed_core import __version__
from mindspeed_core.hooks import API_VERSION
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
from mindspeed_megatron.newer_fields import ACTING, newer_fields
from mindspeed_megatron.touch_points.changes import changes
from mindspeed_megatron.touch_points.record import index, known_uses, known_version
from mindspeed_train.arguments.refusals import REFUSALS

PROOFS = Path(__file__).parents[1] / "plugins/mindspeed_testing/tests/version_proofs.json"
_SWAP_PAGE = (
    "[swap-attention](../../plugins/mindspeed_memory/src/mindspeed_memory/docs/swap-attention.md"
    "#beside-megatron-cores-own-offloading)"
)


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
        *proof_section(),
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
        *left_out_section(),
        "",
        *field_section(),
        "",
        *part_section(),
        "",
        *own_memory_section(),
        "",
        "## What to do about a difference",
        "",
        "`mindspeed-features doctor` compares what is installed with the first table and says how to mend a",
        "difference. A plugin states its own requirements in its package metadata and in `packages` of each",
        "feature; the plan refuses a feature whose requirement is not met.",
    ]
    return "\n".join(lines)


def proof_section() -> list[str]:
    """Count the proofs of stable features that were run on other megatron-cores than that of the suite."""
    rows = []
    for pair, record in json.loads(PROOFS.read_text(encoding="utf-8")).items():
        python, _, core = pair.partition(" x ")
        passed, failed = sum(record["passed"].values()), codes(record["failed"]) or "none"
        rows.append((python, core, record["proofs"], passed, failed, record["without an outcome"]))
    return [
        "`tools/version_proofs.py` runs the proofs of all stable features with the megatron-core that is",
        "installed, the first one of every feature before the others:",
        "",
        *table(("Python", "megatron-core", "proofs", "passed", "failed", "not run"), rows),
    ]


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
        "`--strict-versions` refuses what was not tested. Against a made-up 0.20, which was 0.19.2 with two",
        "functions changed, the comparison took 1.0 s of processor time and named both.",
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


def left_out_section() -> list[str]:
    """List the tests that other megatron-cores than that of the suite are not held to, with the reasons."""
    noxfile = Path(__file__).resolve().parents[1] / "noxfile.py"
    (left_out,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(noxfile.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LEFT_OUT"
    )
    rows = [
        (code(versions), reason, code(name.removeprefix("packages/").removeprefix("plugins/")))
        for versions, reasons in left_out.items()
        for reason, names in reasons.items()
        for name in names
    ]
    return [
        "## Tests that are left out",
        "",
        "`nox -s compat` runs the suite on other megatron-cores without these; a name is the beginning of",
        "all that are left out.",
        "",
        *table(("megatron-core", "reason", "tests"), rows),
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


def part_section() -> list[str]:
    """List what megatron-core gained beside fields, and what becomes of it."""
    rows = [
        (
            code(part.module.removesuffix(".py").replace("/", ".")),
            part.since,
            part.verdict,
            codes((*part.fields, *part.flags)),
        )
        for part in PARTS
    ]
    return [
        "## Parts of newer versions",
        "",
        "What is more than a field. Fields and flags that ask for such a part have a verdict each: above, in",
        "the table of fields, or when they are given.",
        "",
        *table(("part of `megatron.core`", "since", "here", "asked for with"), rows),
    ]


def own_memory_section() -> list[str]:
    """List what megatron-core offloads and recomputes itself, what that needs, and the flags here."""
    rows = [
        (
            f"{code('fine_grained_activation_offloading')} with {code('offload_modules')}, since 0.16",
            code("--swap-attention"),
            "CUDA and TransformerEngine",
        ),
        (
            f"{code('expert_fc1')}, {code('moe_act')} and {code('fused_group_mlp')} of these modules",
            code("--swap-activation-plan"),
            f"{code('TEGroupedMLP')}, TransformerEngine's experts",
        ),
        (f"{code('layernorm')} in {code('recompute_modules')}", code("--recompute-norm"), ""),
        (f"{code('mlp')} in {code('recompute_modules')}", code("--recompute-plan"), ""),
    ]
    return [
        "## Offloading and recomputation of megatron-core's own",
        "",
        *table(("megatron-core", "here", "megatron-core's needs"), rows),
        "",
        "The offloading makes three CUDA streams (`PipelineOffloadManager.__init__`) and two CUDA events a",
        "group (`OffloadTensorGroup.__init__`), ends with *TE CPU offload is not available* where",
        "TransformerEngine cannot be imported (`PipelineOffloadManager.__enter__`), and since 0.19 leaves",
        "every tensor where it is whose device is not of the type `cuda`",
        "(`ChunkOffloadHandler._can_manage_tensor_for_offload`): on an NPU it moves nothing. Recomputation",
        "needs none of it. `benchmarks/upstream_offloading.py` trains both sides of a row in one run, with",
        f"stand-ins for these three on the CPU; the numbers are on the page of {_SWAP_PAGE}.",
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
