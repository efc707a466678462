"""Count what the features of mindspeed-memory save of activations, beside closed formulas.

The first half of part a of `memory.py` trains one small LLaMA on the CPU with and without each feature,
from the same weights, and counts bytes of tensors: the same on every machine. Part e follows what is copied
between device and host in that model, and plans a few layers of LLaMA-7B's shape without values, for the
bytes that swapping moves and the bandwidth that they need beside a layer's arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from mindspeed_core.activation import activate
from mindspeed_memory.saved.host_copy import HostCopy
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.training import SideResult, train_side
from mindspeed_testing.worlds import run_world
from mindspeed_train import loop

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
_CODED = ("--compress-min-elements", "1024")
_FULL = ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers")
_ATTENTION_ALONE = ("--swap-attention", "--swap-modules", "self_attention", *_SMALL)
_STEPS = 7
_PLAN = ("--adaptive-recompute-profiling-step", "6", "--adaptive-recompute-device-size", "16")
_INTERLEAVED = ("--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1")
_ROW = TOKENS * HIDDEN * BYTES
_KEYS = TOKENS * GROUPS * (HIDDEN // HEADS) * BYTES
_ATTENTION = _ROW + (_ROW + 2 * _KEYS) + (_ROW + _KEYS) + _ROW


class Side(NamedTuple):
    """One training.

    Attributes:
        flags: beside those of the side that it is compared with.
        fewer: bytes that are fewer after a forward pass where a closed formula says so.
        base: the side that it is compared with.
    """

    flags: tuple[str, ...] = ()
    fewer: int | None = None
    base: str = "plain"


_WHOLE, _INPUTS, _ALL = "whole layers", "whole layers, swapped inputs", "whole layers, all swapped"
_HALF, _PIPELINE = "plain, bfloat16", "plain, interleaved pipeline of 2"
SIDES = {
    "plain": Side(),
    "activation functions": Side(("--recompute-activation-function",), LAYERS * TOKENS * WIDTH * BYTES),
    # Of each token a norm keeps the inverse of its root mean square besides.
    "norms": Side(("--recompute-norm",), LAYERS * 2 * (_ROW + TOKENS * BYTES)),
    # The first product has two halves; the kernel saves nothing else.
    "feed-forward by pattern": Side(
        ("--recompute-plan", "decoder.layers.{*}.mlp"), LAYERS * TOKENS * 3 * WIDTH * BYTES
    ),
    "swapped attention": Side(_ATTENTION_ALONE, (LAYERS - 1) * _ATTENTION),
    "swapped by pattern": Side(("--swap-activation-plan", "decoder.layers.{0-2}", *_SMALL)),
    "swapped by a trace": Side(("--smart-swap", *_SMALL)),
    "swapped attention, feed-forward again": Side(("--swap-attention", *_SMALL, *_FULL, str(LAYERS))),
    "activation functions, norms, swapped attention": Side(
        ("--recompute-activation-function", "--recompute-norm", "--swap-attention", *_SMALL)
    ),
    "measured plan within 16 MiB": Side(("--adaptive-recompute-device-swap", *_PLAN)),
    "the same with swaps": Side(("--adaptive-memory-optimization", *_PLAN, *_SMALL)),
    _WHOLE: Side((*_FULL, str(LAYERS))),
    _INPUTS: Side(("--swap-layer-input", *_SMALL), (LAYERS - 1) * _ROW, _WHOLE),
    _ALL: Side(("--swap-optimizer",), 0, _INPUTS),
    _HALF: Side(("--bf16",)),
    "compressed activations": Side(("--compress-activation", "0", *_CODED), None, _HALF),
    "compressed products": Side(("--compress-dense", "level0", *_CODED), None, _HALF),
    "compressed products, partly on the host": Side(("--compress-dense", "level1", *_CODED), None, _HALF),
    _PIPELINE: Side(_INTERLEAVED),
    "computed again in the bubble": Side(("--recompute-in-bubble",), None, _PIPELINE),
    "computed again in advance": Side(("--recompute-in-advance", *_FULL, "1"), None, _PIPELINE),
}
_OTHER_NUMBERS = (_HALF, _PIPELINE)
"""Sides that train in another precision or on other ranks than the one that they are compared with."""
_RESIDENT = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
_BANDWIDTH = 25e9
_SEVEN_B = (
    *("--num-layers", str(LAYERS), "--hidden-size", "4096", "--num-attention-heads", "32"),
    *("--ffn-hidden-size", "11008", "--seq-length", "4096", "--max-position-embeddings", "4096"),
    *("--vocab-size", "32000", "--bf16", "--tensor-model-parallel-size", "8", "--sequence-parallel"),
    *("--untie-embeddings-and-output-weights", "--global-batch-size", "1", *MODEL[MODEL.index("--swiglu") :]),
)
_SEVEN_B_ROW = 2 * 4096 * (4096 // 8)
_SEVEN_B_BYTES = 7 * _SEVEN_B_ROW
"""Of a layer: the norm's result; query, key and value; rotated query and key; the output."""


def _flags(name: str) -> tuple[str, ...]:
    """Return all flags of a side."""
    side = SIDES[name]
    return (*(_flags(side.base) if name != side.base else ()), *side.flags)


def trained(name: str, initial: Any = None) -> SideResult:
    """Train until every policy has its plan, and measure a further step."""
    flags = _flags(name)
    ranks = 2 if _INTERLEAVED[0] in flags else 1
    return train_side(
        (*MODEL, *flags), ranks, _STEPS, initial=initial, gradients=False, measure=True, platform="cpu"
    )


def activation_bytes() -> dict[str, Any]:
    """Return the bytes of each feature beside the side of the same run that it is compared with."""
    sides: dict[str, SideResult] = {}
    rows: dict[str, Any] = {}
    for name, (flags, formula, base) in SIDES.items():
        side = sides[name] = trained(name, sides["plain"].initial if sides else None)
        other = sides[base]
        after, peak = side.measures["forward_bytes"], side.measures["peak_bytes"]
        # What was put on the host is counted with the optimizer's state; activations wait there too.
        swapped = side.measures["host_bytes"] - other.measures["host_bytes"]
        on_host = swapped if "--swap-optimizer" in flags else 0
        rows[name] = {
            "flags": flags,
            "base": base,
            "forward_bytes": after,
            "peak_bytes": peak,
            "ratio_of_peak": peak / other.measures["peak_bytes"],
            "resident_bytes": sum(side.measures[measure] for measure in _RESIDENT) - on_host,
            "fewer": other.measures["forward_bytes"] - after,
            "formula": formula,
            "host_bytes": side.measures["host_bytes"],
            "host_buffers_in_last_step": side.measures["host_buffers"],
            "same_bits": None if name in _OTHER_NUMBERS else side.losses == other.losses,
        }
    return rows


def show_activation_bytes(rows: dict[str, Any]) -> None:
    """Print the table."""
    print(
        f"{'':<48}{'after forward':>14}{'peak':>12}{'ratio':>7}{'fewer':>11}{'formula':>10}{'resident':>12}"
        f"{'host':>11}"
    )
    for name, row in rows.items():
        formula = row["formula"]
        print(
            f"{name:<48}{row['forward_bytes']:>14,.0f}{row['peak_bytes']:>12,.0f}{row['ratio_of_peak']:>7.3f}"
            f"{row['fewer']:>11,.0f}{'' if formula is None else format(formula, ',.0f'):>10}"
            f"{row['resident_bytes']:>12,.0f}{row['host_bytes']:>11,.0f}"
            f"{'  OTHER BITS' if row['same_bits'] is False else ''}"
            f"{'' if formula in (None, row['fewer']) else '  NOT THE FORMULA'}"
        )


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


class Copies:
    """Follows what is copied between device and host, by the number of the storage in its pass."""

    def __init__(self) -> None:
        """Start with nothing."""
        self.order: list[str] = []
        self._numbers: dict[int, int] = {}

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the copies of all engines inside the context."""
        begin, fetch = HostCopy.__init__, HostCopy.fetch
        copies = self

        def beginning(copy: HostCopy, *args: Any) -> None:
            copies._numbers[id(copy)] = sum(one.startswith("out") for one in copies.order)
            copies.order.append(f"out {copies._numbers[id(copy)]}")
            begin(copy, *args)

        def fetching(copy: HostCopy) -> None:
            there = copy.is_on_device
            fetch(copy)
            if copy.is_on_device and not there:
                copies.order.append(f"back {copies._numbers[id(copy)]}")

        HostCopy.__init__, HostCopy.fetch = beginning, fetching  # type: ignore[method-assign]
        try:
            yield
        finally:
            HostCopy.__init__, HostCopy.fetch = begin, fetch  # type: ignore[method-assign]


def followed_copies() -> dict[str, Any]:
    """Train three steps with swapped attention; return what was copied in the last one, in order."""
    flags = training_flags((*MODEL, *_ATTENTION_ALONE, "--global-batch-size", "1"), 3)
    copies = Copies()
    with activate(flags, platform="cpu", host="standalone") as session, copies.followed():
        run = loop.setup(session)
        session.call("start_run", run=run)
        found: Any = next(feature._copies for feature in session._features if hasattr(feature, "_copies"))
        made = []
        for _ in range(3):
            copies.order.clear()
            session.call("train_step", run=run)
            made.append(found.pool.made)
        late = run.metrics.local()["late swaps"][1]
        loop.teardown(session)
    return {"order": copies.order, "buffers_made": made, "late": late}


def swapped_bytes() -> dict[str, Any]:
    """Return the copies of a step, and what swapping moves at LLaMA-7B's shape and how long that takes."""
    plain, _ = planned()
    peak, host = planned("--swap-attention", "--swap-modules", "self_attention")
    full = (*_FULL, str(LAYERS))
    whole, _ = planned(*full)
    input_peak, input_host = planned(*full, "--swap-layer-input")
    forward = 2 * 4096 * (4 * 4096 * 4096 + 3 * 4096 * 11008) / 8 + 2 * 2 * 4096**2 * 4096 / 8
    return {
        "copies": run_world(followed_copies, 1)[0],
        "attention": _moved(host, _SEVEN_B_BYTES, peak, plain, forward),
        # Backward computes the layer again, so that its input has two passes to come back beside.
        "inputs": _moved(input_host, _SEVEN_B_ROW, input_peak, whole, forward),
    }


def _moved(host: int, formula: int, peak: int, plain: int, forward: float) -> dict[str, float]:
    per_layer = host / (LAYERS - 1)
    return {
        "bytes_per_layer": per_layer,
        "formula": formula,
        "peak_bytes": peak,
        "plain_peak_bytes": plain,
        "milliseconds_at_25_gb_s": per_layer / _BANDWIDTH * 1e3,
        "forward_flop_per_layer": forward,
        "flop_per_second_that_hide_it": forward / (per_layer / _BANDWIDTH),
    }


def show_swapped_bytes(found: dict[str, Any]) -> None:
    """Print what moved."""
    copies = found["copies"]
    print(f"copies of a step: {', '.join(copies['order'])}; {copies['late']:.0f} late")
    print(f"host buffers made by the end of each step: {', '.join(map(str, copies['buffers_made']))}")
    for name in ("attention", "inputs"):
        row = found[name]
        print(
            f"LLaMA-7B, tensor parallelism 8, {name}: {row['bytes_per_layer'] / 2**20:.1f} MiB a layer "
            f"(formula {row['formula'] / 2**20:.1f}), {row['milliseconds_at_25_gb_s']:.2f} ms at 25 GB/s, "
            f"hidden up to {row['flop_per_second_that_hide_it'] / 1e12:,.0f} TFLOP/s; peak of {LAYERS} "
            f"layers {row['peak_bytes'] / 2**20:,.0f} MiB against {row['plain_peak_bytes'] / 2**20:,.0f}"
        )


def missed_bytes(rows: dict[str, Any]) -> list[str]:
    """Return what is not as the formulas say, or trained otherwise."""
    found = [
        f"{name}: {row['fewer']:,.0f} bytes fewer, {row['formula']:,.0f} by formula"
        for name, row in rows.items()
        if row["formula"] not in (None, row["fewer"])
    ]
    return found + [f"{name}: other bits" for name, row in rows.items() if row["same_bits"] is False]


def missed_copies(found: dict[str, Any]) -> list[str]:
    """Return what is not as the formulas say, late copies, and buffers made after the second step."""
    lines = [
        f"swapped {name}: {row['bytes_per_layer']:,.0f} bytes a layer, {row['formula']:,} by formula"
        for name, row in found.items()
        if name != "copies" and row["bytes_per_layer"] != row["formula"]
    ]
    copies = found["copies"]
    if copies["late"]:
        lines.append(f"{copies['late']:.0f} copies came back late")
    if copies["buffers_made"][-1] != copies["buffers_made"][1]:
        lines.append("host buffers were made after the second step")
    return lines
