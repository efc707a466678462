"""The report of a step as text and as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_megatron.instruments.held_tensors import (
    ACTIVATIONS,
    GRADIENTS,
    MAIN_PARAMETERS,
    OPTIMIZER_STATE,
    PARAMETERS,
    HeldTensor,
    PhaseBytes,
)
from mindspeed_memory.report.formulas import OPTIMIZER, Formula
from mindspeed_memory.report.timeline import readable

_BY_KIND = {
    PARAMETERS: "--tensor-model-parallel-size, --pipeline-model-parallel-size",
    GRADIENTS: "--grad-reduce-in-bf16 halves it, with --release-fp32-grad in the update too",
    MAIN_PARAMETERS: "--swap-optimizer, or --reuse-fp32-param for half of it",
    OPTIMIZER_STATE: "--swap-optimizer, --virtual-optimizer or --compress-optimizer",
}
_BY_PART = (
    ("layernorm", "--recompute-norm"),
    ("self_attention", "--swap-attention"),
    ("linear_fc1", "--compress-dense, or --recompute-plan"),
    ("experts", "--recompute-activation-function, or --recompute-plan"),
    ("mlp", "--recompute-activation-function"),
    ("layers", "--recompute-granularity full"),
)
_NOTHING = "no flag of this package"


def removed_by(kind: str, module: str) -> str:
    """Return the flags that remove a tensor, or a part of it.

    Args:
        kind: its use, of `mindspeed_megatron.instruments.storage`.
        module: qualified name of the module that made it.
    """
    if kind != ACTIVATIONS:
        return _BY_KIND.get(kind, _NOTHING)
    parts = module.split(".")
    for word, flags in _BY_PART:
        if "layers" in parts and any(word in part for part in parts):
            return flags
    return _NOTHING


LARGEST = 3


def report_of(
    rank: int, phases: Sequence[PhaseBytes], kept: Mapping[str, int], formulas: Mapping[str, Formula]
) -> dict[str, Any]:
    """Return the report of a rank as data.

    Args:
        rank: of the world.
        phases: of one step.
        kept: bytes by kind after the step.
        formulas: of what is kept.
    """
    kinds = dict(kept)
    optimizer = kinds.pop(MAIN_PARAMETERS, 0) + kinds.pop(OPTIMIZER_STATE, 0)
    rows = {**kinds, OPTIMIZER: optimizer}
    return {
        "rank": rank,
        "kept": [
            {
                "kind": kind,
                "bytes": size,
                **(
                    {"formula": formulas[kind].text, "by_formula": formulas[kind].bytes}
                    if kind in formulas
                    else {}
                ),
            }
            for kind, size in rows.items()
        ],
        "phases": [
            {
                "name": phase.name,
                "peak_bytes": phase.peak,
                "host_bytes": phase.host,
                "kinds": dict(phase.kinds),
                "activations_by_module": dict(phase.modules),
                "largest": [_described(tensor) for tensor in phase.largest[:LARGEST]],
            }
            for phase in phases
        ],
    }


def text_of(report: Mapping[str, Any]) -> str:
    """Return a report as lines of text."""
    lines = [f"memory of rank {report['rank']} in its second step", "  kept between steps"]
    for row in report["kept"]:
        beside = f"  {row['formula']} = {readable(row['by_formula'])}" if "formula" in row else ""
        lines.append(f"    {row['kind']:<36}{readable(row['bytes']):>14}{beside}")
    for phase in report["phases"]:
        host = f", {readable(phase['host_bytes'])} on the host" if phase["host_bytes"] else ""
        lines.append(f"  peak of {phase['name']}: {readable(phase['peak_bytes'])}{host}")
        lines += [f"    {kind:<36}{readable(size):>14}" for kind, size in phase["kinds"].items()]
        if phase["kinds"].get(ACTIVATIONS):
            lines += [
                f"      {module:<34}{readable(size):>14}"
                for module, size in list(phase["activations_by_module"].items())[:LARGEST]
            ]
        lines.append("    largest tensors, and what removes them")
        lines += [
            f"      {readable(one['bytes'])} {one['kind']} {one['dtype']}{one['shape']} {one['module']}: "
            f"{one['removed_by']}"
            for one in phase["largest"]
        ]
    lines.append(
        "  counted are storages of tensors: no workspaces of kernels, no rounding or gaps of the allocator"
    )
    return "\n".join(lines)


def _described(tensor: HeldTensor) -> dict[str, Any]:
    return {
        "bytes": tensor.bytes,
        "kind": tensor.kind,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "module": tensor.module,
        "operation": tensor.operation,
        "removed_by": removed_by(tensor.kind, tensor.module),
    }
