"""Imports that take the place of MindSpeed's modules.

The operators that MindSpeed's branches define are facts in ``mindspeed.json``; whether an operator is here is
read from the sources of this repository's plugins, without importing them.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from mindspeed_flags import FACTS
from tables import code, table

from mindspeed_core.registry import Registry
from mindspeed_kernels.absent import ABSENT

ROOT = Path(__file__).resolve().parent.parent
ENTRANCES = (
    (
        "import mindspeed.megatron_adaptor",
        "import mindspeed_core.megatron_adaptor",
        "anywhere among the imports of the script",
    ),
    (
        "from mindspeed.megatron_adaptor import repatch",
        "from mindspeed_core import activate",
        "`activate` once, then `session.reopen(flags)`",
    ),
    (
        "from mindspeed.features_manager.feature import MindSpeedFeature",
        "from mindspeed_core import Feature",
        "methods become stages, see the migration guide",
    ),
    (
        "from mindspeed.patch_utils import MindSpeedPatchesManager",
        "from mindspeed_core import Patch",
        "declared in `patches` of a feature; applied and taken back by the session",
    ),
)
"""Lines that are not operators: old, new, remark."""

KEPT = ("mindspeed.ops.fusion_attention_v2", "mindspeed.ops.gmm_w4a8")
"""Modules that are here under their own name, because functions of the same name differ there."""


@lru_cache(maxsize=1)
def operators_here() -> Mapping[str, str]:
    """The module that defines each name of the plugins' operator packages; one of the same name first."""
    found: dict[str, str] = {}
    for path in sorted(ROOT.glob("plugins/*/src/*/ops/*.py")):
        module = f"{path.parts[-3]}.ops.{path.stem}"
        for name in defined(ast.parse(path.read_text(encoding="utf-8"))):
            if name not in found or path.stem == name:
                found[name] = module
    return found


def defined(tree: ast.Module) -> Iterator[str]:
    """The public names that a module defines itself."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        else:
            continue
        yield from (name for name in names if not name.startswith("_"))


def imports_page(registry: Registry) -> str:
    """Every public import of MindSpeed and what to write instead."""
    operators: Mapping[str, list[str]] = json.loads(FACTS.read_text(encoding="utf-8"))["operators"]
    here = operators_here()
    moved, absent = [], []
    for module, names in operators.items():
        for name in names:
            old = f"from {module} import {name}"
            if name in here:
                same = f"mindspeed_kernels.ops.{module.rpartition('.')[2]}"
                place = same if module in KEPT else here[name]
                moved.append((code(old), code(f"from {place} import {name}")))
            else:
                absent.append((code(name), code(module), ABSENT[name]))
    return "\n".join(
        [
            "# MindSpeed's imports",
            "",
            "What to write instead. The rest of a project: [moving from MindSpeed](../migration.md).",
            "",
            "## Entrances",
            "",
            *table(("old", "new", "remark"), ((code(a), code(b), c) for a, b, c in ENTRANCES)),
            "",
            "## Operators",
            "",
            "Functions keep their names and arguments; the device decides what runs. Norms, SwiGLU and",
            "attention, which MindSpeed has elsewhere, are `rms_norm`, `swiglu` and `attention` of",
            "`mindspeed_kernels.ops`.",
            "",
            *table(("old", "new"), moved),
            "",
            "## Operators that are not here",
            "",
            "Asked for by name, each of these answers with its sentence. Triton kernels of",
            "`mindspeed.ops.triton` have no counterpart here: flash-linear-attention publishes them.",
            "",
            *table(("operator", "was in", "why, and what instead"), absent),
        ]
    )
