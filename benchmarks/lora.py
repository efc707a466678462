"""Adapters: bytes of gradients and optimizer state beside those of training everything, and elements trained.

``python benchmarks/lora.py`` trains a GPT once whole and once with adapters on all linears, in one process
each, and prints both sides and the ratio. Elements of gradient buffers and optimizer state must be exactly
those that train: four bytes of gradients for each, eight of moments, and four a tensor that count steps;
the exit status says so. ``--write`` keeps the rows in ``results/lora.json``.
"""

from __future__ import annotations

import argparse
import json
import sys

from machine import write

from mindspeed_testing.training import SideResult, train_side

_MODEL = (
    *("--disable-bias-linear", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--swiglu"),
    "--untie-embeddings-and-output-weights",
)
_TARGETS = ("--lora-target-modules", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
_MEASURES = ("gradient_bytes", "optimizer_bytes", "parameter_bytes", "step_peak_bytes")


def elements(hidden: int, layers: int, rank: int) -> int:
    """Return how many elements adapters of all linears have, of a model whose MLP is four times as wide."""
    sizes = ((hidden, 3 * hidden), (hidden, hidden), (hidden, 8 * hidden), (4 * hidden, hidden))
    return layers * sum(rank * (inputs + outputs) for inputs, outputs in sizes)


def side(*flags: str) -> SideResult:
    """Train one side."""
    return train_side((*_MODEL, *flags), 1, 2, gradients=False, measure=True)


def main() -> int:
    """Print one row for each rank; the exit status says whether nothing else than adapters has buffers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--write", action="store_true", help="Keep the results.")
    given = parser.parse_args()
    rows = []
    size = ("--hidden-size", str(given.hidden_size), "--num-layers", str(given.num_layers))
    size += ("--ffn-hidden-size", str(4 * given.hidden_size))
    whole = side(*size).measures
    for rank in given.ranks:
        adapted = side(*size, *_TARGETS, "--lora-r", str(rank)).measures
        count = elements(given.hidden_size, given.num_layers, rank)
        row: dict[str, object] = {"rank": rank, "trained elements": count}
        for name in _MEASURES:
            row[name] = {
                "whole": whole[name],
                "adapters": adapted[name],
                "ratio": adapted[name] / whole[name],
            }
        row["gradient bytes per trained element"] = adapted["gradient_bytes"] / count
        row["optimizer bytes per trained element"] = adapted["optimizer_bytes"] / count
        # Two tensors beside each of four linears of a layer.
        steps = 4 * 2 * 4 * given.num_layers
        row["exact"] = (adapted["gradient_bytes"], adapted["optimizer_bytes"]) == (
            4 * count,
            8 * count + steps,
        )
        print(json.dumps(row))
        rows.append(row)
    if given.write:
        write("lora", {"hidden size": given.hidden_size, "layers": given.num_layers, "rows": rows})
    return 0 if all(row["exact"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
