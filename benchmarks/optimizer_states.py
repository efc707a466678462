"""Count the bytes a parameter that update rules keep, at sizes that no block divides.

A small model is trained for a step on two processes with the distributed optimizer, which cuts parameters
anywhere. For each part of a parameter the bytes of its state are counted. A formula may be missed by the
scales of one block that is cut, in every part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from mindspeed_core.activation import activate
from mindspeed_megatron.global_state import destroy_megatron_state
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.worlds import run_world
from mindspeed_train import loop

ODD = (
    *("--hidden-size", "60", "--ffn-hidden-size", "131", "--vocab-size", "127", "--num-layers", "3"),
    *("--make-vocab-size-divisible-by", "1", "--use-distributed-optimizer"),
)
RULES: Mapping[str, tuple[tuple[str, ...], float, int]] = {
    "adam": ((), 8, 0),
    "fused adam": (("--optimizer", "fused_adam"), 8, 0),
    "averaged weights": (("--optimizer-selection", "fused_ema_adamw"), 12, 0),
    "cadam": (("--optimizer", "cadam"), 2 + 1 / 128, 1),
    "moments of 8 bits": (("--quant-states", "fp8"), 2 + 2 / 128, 2),
    "moments of bfloat16": (("--quant-states", "bf16"), 4, 0),
}
"""Flags, bytes a parameter, and bytes of scales for a block."""


def counted_rules() -> dict[str, Any]:
    """Return what each rule keeps on two ranks."""
    ranks = run_world(_count_all, 2, timeout=600)
    found = {}
    for name, (_, formula, scales) in RULES.items():
        parts = [part for rank in ranks for part in rank[name]]
        excess = [kept - formula * numbers for numbers, kept in parts]
        found[name] = {
            "formula": formula,
            "parameters": sum(numbers for numbers, _ in parts),
            "bytes": sum(kept for _, kept in parts),
            "parts": len(parts),
            "largest_excess": max(excess),
            "within": all(0 <= bytes_more < 2 * max(scales, 1e-9) for bytes_more in excess),
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


def _count_all() -> dict[str, list[tuple[int, int]]]:
    return {name: _count(flags) for name, (flags, _, _) in RULES.items()}


def _count(flags: tuple[str, ...]) -> list[tuple[int, int]]:
    """Return elements and bytes of the state of each part of a parameter that this rank updates."""
    try:
        with activate(training_flags((*ODD, *flags), 2), platform="cpu", host="standalone") as session:
            run = loop.setup(session)
            session.call("train_step", run=run)
            inner = [part.optimizer for part in run.optimizer.chained_optimizers]
            return [
                (parameter.numel(), _bytes(state))
                for optimizer in inner
                for parameter, state in optimizer.state.items()
                if parameter.numel()
            ]
    finally:
        destroy_megatron_state()


def _bytes(state: Mapping[str, Any]) -> int:
    """Return the bytes of a state's tensors, without counts of steps."""
    tensors = [entry for entry in tree_iter(dict(state)) if isinstance(entry, torch.Tensor) and entry.dim()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


if __name__ == "__main__":
    results = counted_rules()
    show_rules(results)
    raise SystemExit(1 if missed_rules(results) else 0)
