"""Count the bytes a parameter that update rules keep, at sizes that no block divides.

A small model is trained for a step on two processes with the distributed optimizer, which cuts parameters
anywhere. For each part of a parameter the bytes of its state are counted. A formula may be missed by the
scales of one block that is cut, in every part. Part ``state`` of `optimizers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_iter

from mindspeed_core import ParameterPart
from mindspeed_core.activation import activate
from mindspeed_megatron.global_state import destroy_megatron_state
from mindspeed_megatron.parameter_parts import parts_of
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.worlds import run_world
from mindspeed_train import loop

ODD = (
    *("--hidden-size", "60", "--ffn-hidden-size", "131", "--vocab-size", "127", "--num-layers", "3"),
    *("--make-vocab-size-divisible-by", "1", "--use-distributed-optimizer"),
)


class Rule(NamedTuple):
    """An update rule.

    Attributes:
        flags: that choose it.
        formula: bytes for each number of a part of a parameter.
        scales: bytes of the scales of a block.
    """

    flags: Sequence[str]
    formula: Callable[[ParameterPart], float]
    scales: int = 0


def _of_muon(part: ParameterPart) -> float:
    """Return one float32 moment for matrices, and Adam's two for everything else."""
    looked_up = "embedding" in part.name or "output_layer" in part.name
    return 4 if len(part.shape) == 2 and not looked_up else 8


RULES: Mapping[str, Rule] = {
    "adam": Rule((), lambda part: 8),
    "fused adam": Rule(("--optimizer", "fused_adam"), lambda part: 8),
    "averaged weights": Rule(("--optimizer-selection", "fused_ema_adamw"), lambda part: 12),
    "cadam": Rule(("--optimizer", "cadam"), lambda part: 2 + 1 / 128, 1),
    "moments of 8 bits": Rule(("--quant-states", "fp8"), lambda part: 2 + 2 / 128, 2),
    "moments of bfloat16": Rule(("--quant-states", "bf16"), lambda part: 4),
    "muon": Rule(("--optimizer", "muon"), _of_muon),
}


def counted_rules() -> dict[str, Any]:
    """Return what each rule keeps on two ranks."""
    ranks = run_world(_count_all, 2, timeout=600)
    found = {}
    for name, rule in RULES.items():
        parts = [part for rank in ranks for part in rank[name]]
        excess = [kept - formula for _, formula, kept in parts]
        numbers = sum(part[0] for part in parts)
        found[name] = {
            "formula": sum(formula for _, formula, _ in parts) / numbers,
            "parameters": numbers,
            "bytes": sum(kept for _, _, kept in parts),
            "parts": len(parts),
            "largest_excess": max(excess),
            "within": all(0 <= more < 2 * max(rule.scales, 1e-9) for more in excess),
        }
    return found


def show_rules(found: Mapping[str, Any]) -> None:
    """Print the table."""
    print(f"{'':<22}{'formula':>9}{'bytes a parameter':>19}{'most beyond it in a part':>26}")
    for name, row in found.items():
        each = row["bytes"] / row["parameters"]
        said = "" if row["within"] else "  MISSED"
        print(f"{name:<22}{row['formula']:>9.3f}{each:>19.3f}{row['largest_excess']:>26.2f}{said}")


def missed_rules(found: Mapping[str, Any]) -> list[str]:
    """Return the rules that keep something else than they say."""
    return [f"{name}: not the bytes of its formula" for name, row in found.items() if not row["within"]]


def _count_all() -> dict[str, list[tuple[int, float, int]]]:
    return {name: _count(rule) for name, rule in RULES.items()}


def _count(rule: Rule) -> list[tuple[int, float, int]]:
    """Return numbers, bytes by the formula, and bytes of the state of each part that this rank updates."""
    try:
        with activate(training_flags((*ODD, *rule.flags), 2), platform="cpu", host="standalone") as session:
            run = loop.setup(session)
            session.call("train_step", run=run)
            found = []
            for hosting in run.optimizer.chained_optimizers:
                inner = hosting.optimizer
                parts = parts_of(hosting, inner.param_groups, run.model, run.pg)
                for parameter, state in inner.state.items():
                    size = parameter.numel()
                    if size:
                        found.append((size, size * rule.formula(parts.of(parameter)), _bytes(state)))
            return found
    finally:
        destroy_megatron_state()


def _bytes(state: Mapping[str, Any]) -> int:
    """Return the bytes of a state's tensors, without counts of steps."""
    tensors = [entry for entry in tree_iter(dict(state)) if isinstance(entry, torch.Tensor) and entry.dim()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
