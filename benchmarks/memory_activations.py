"""Count what the features of mindspeed-memory save of activations, beside closed formulas.

Part (a) trains one small LLaMA on the CPU with and without each feature, from the same weights, and counts
bytes of tensors: the same on every machine. Part (e) plans a few layers of LLaMA-7B's shape without values,
for the bytes that swapping moves and the bandwidth that they need beside a layer's arithmetic.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from machine import write

from mindspeed_core.activation import activate
from mindspeed_core.hosts.standalone import loop
from mindspeed_core.testing.model_flags import training_flags
from mindspeed_core.testing.training import SideResult, train_side

LAYERS, TOKENS, HIDDEN, WIDTH, HEADS, GROUPS, BYTES = 4, 128, 128, 384, 8, 4, 4
"""Grouped-query attention and SwiGLU; float32, one micro-batch of one sample under way."""
MODEL = (
    *("--num-layers", str(LAYERS), "--hidden-size", str(HIDDEN), "--num-attention-heads", str(HEADS)),
    *("--group-query-attention", "--num-query-groups", str(GROUPS), "--ffn-hidden-size", str(WIDTH)),
    *("--seq-length", str(TOKENS), "--max-position-embeddings", str(TOKENS), "--hidden-dropout", "0.1"),
    *("--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm", "--position-embedding-type", "rope"),
    *("--use-fused-rmsnorm", "--use-fused-swiglu", "--use-flash-attn"),
)
_SMALL = ("--swap-min-bytes", "4096")
_FULL = ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers")
_ROW = TOKENS * HIDDEN * BYTES
_KEYS = TOKENS * GROUPS * (HIDDEN // HEADS) * BYTES
_ATTENTION = _ROW + (_ROW + 2 * _KEYS) + (_ROW + _KEYS) + _ROW
SIDES: dict[str, tuple[tuple[str, ...], float | None]] = {
    "activation functions": (("--recompute-activation-function",), LAYERS * TOKENS * WIDTH * BYTES),
    # Of each token a norm keeps the inverse of its root mean square besides.
    "norms": (("--recompute-norm",), LAYERS * 2 * (_ROW + TOKENS * BYTES)),
    "swapped attention": (
        ("--swap-attention", "--swap-modules", "self_attention", *_SMALL),
        (LAYERS - 1) * _ATTENTION,
    ),
    "whole layers": ((*_FULL, str(LAYERS)), None),
    "whole layers, swapped inputs": ((*_FULL, str(LAYERS), "--swap-layer-input", *_SMALL), None),
    "swapped attention, feed-forward again": (("--swap-attention", *_SMALL, *_FULL, str(LAYERS)), None),
    "activation functions, norms, swapped attention": (
        ("--recompute-activation-function", "--recompute-norm", "--swap-attention", *_SMALL),
        None,
    ),
}
"""Flags, and the bytes that are fewer after a forward pass where a closed formula says so."""
_BANDWIDTH = 25e9
_SEVEN_B = (
    *("--num-layers", str(LAYERS), "--hidden-size", "4096", "--num-attention-heads", "32"),
    *("--ffn-hidden-size", "11008", "--seq-length", "4096", "--max-position-embeddings", "4096"),
    *("--vocab-size", "32000", "--bf16", "--tensor-model-parallel-size", "8", "--sequence-parallel"),
    *("--untie-embeddings-and-output-weights", "--global-batch-size", "1", *MODEL[MODEL.index("--swiglu") :]),
)
_SEVEN_B_BYTES = 2 * 4096 * (4096 // 8) * 7
"""Of a layer: the norm's result; query, key and value; rotated query and key; the output."""


def trained(flags: Sequence[str], initial: Any = None) -> SideResult:
    """Train two steps and measure a third one."""
    return train_side((*MODEL, *flags), 1, 2, initial=initial, gradients=False, measure=True, platform="cpu")


def on_cpu() -> dict[str, Any]:
    """Part (a): bytes of each feature beside the plain model of the same run."""
    plain = trained(())
    rows: dict[str, Any] = {}
    resident = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
    print(f"{'':<48}{'after forward':>14}{'peak':>12}{'ratio':>7}{'fewer':>10}{'formula':>10}{'host':>9}")
    for name, (flags, formula) in {"plain": ((), None), **SIDES}.items():
        side = trained(flags, plain.initial) if flags else plain
        after, peak = side.measures["forward_bytes"], side.measures["peak_bytes"]
        fewer = plain.measures["forward_bytes"] - after
        rows[name] = {
            "flags": flags,
            "forward_bytes": after,
            "peak_bytes": peak,
            "ratio_of_peak": peak / plain.measures["peak_bytes"],
            "resident_bytes": sum(side.measures[measure] for measure in resident),
            "fewer": fewer,
            "formula": formula,
            "host_bytes": side.measures["host_bytes"],
            "host_buffers_in_third_step": side.measures["host_buffers"],
            "same_bits": side.losses == plain.losses,
        }
        wrong = "" if formula in (None, fewer) else "  NOT THE FORMULA"
        print(
            f"{name:<48}{after:>14,.0f}{peak:>12,.0f}{rows[name]['ratio_of_peak']:>7.3f}{fewer:>10,.0f}"
            f"{'' if formula is None else format(formula, ',.0f'):>10}{side.measures['host_bytes']:>9,.0f}"
            f"{'' if rows[name]['same_bits'] else '  OTHER BITS'}{wrong}"
        )
    return rows


def planned(*flags: str) -> tuple[int, int]:
    """Plan two steps of one rank of eight; return the peak on the device, and the host's bytes at its end."""
    line = training_flags((*_SEVEN_B, *flags, "--fake-world-size", "8"), 2)
    with activate(line, platform="fake", host="standalone") as session:
        run = loop.setup(session)
        session.call("start_run", run=run)
        for _ in range(2):
            session.call("train_step", run=run)
        storage: Any = session.platform.storage
        phases = {phase.name: phase for phase in storage.report()}
        host = storage.host
        loop.teardown(session)
    return phases["forward and backward"].peak, host


def at_seven_b() -> dict[str, Any]:
    """Part (e): what swapping moves at LLaMA-7B's shape, and how long that takes."""
    plain, _ = planned()
    peak, host = planned("--swap-attention", "--swap-modules", "self_attention")
    per_layer = host / (LAYERS - 1)
    forward = 2 * 4096 * (4 * 4096 * 4096 + 3 * 4096 * 11008) / 8 + 2 * 2 * 4096**2 * 4096 / 8
    row = {
        "bytes_per_layer": per_layer,
        "formula": _SEVEN_B_BYTES,
        "peak_bytes": peak,
        "plain_peak_bytes": plain,
        "milliseconds_at_25_gb_s": per_layer / _BANDWIDTH * 1e3,
        "forward_flop_per_layer": forward,
        "flop_per_second_that_hide_it": forward / (per_layer / _BANDWIDTH),
    }
    print(
        f"LLaMA-7B, tensor parallelism 8: {per_layer / 2**20:.1f} MiB a layer (formula "
        f"{_SEVEN_B_BYTES / 2**20:.1f}), {row['milliseconds_at_25_gb_s']:.2f} ms at 25 GB/s, hidden up to "
        f"{row['flop_per_second_that_hide_it'] / 1e12:.0f} TFLOP/s; peak of {LAYERS} layers "
        f"{peak / 2**20:,.0f} MiB against {plain / 2**20:,.0f}"
    )
    return row


def main(argv: Sequence[str] | None = None) -> int:
    """Count, print a table, and write the numbers where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the numbers in benchmarks/results")
    options = parser.parse_args(argv)
    results = {"cpu": on_cpu(), "llama-7b": at_seven_b()}
    if options.write:
        print(f"written to {write('memory_activations', results).name}")
    wrong = [name for name, row in results["cpu"].items() if row["formula"] not in (None, row["fewer"])]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
