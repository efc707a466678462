"""Measure what the optimizer's features of mindspeed-memory save, each beside plain AdamW in the same run.

Part a trains a small GPT on two processes and counts bytes that a rank keeps. Part b plans published models,
one rank of each in shapes alone, and compares measured bytes with the formulas. Part c counts the bytes a
parameter that split main parameters take, and times their update; its times are this machine's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from machine import write

from mindspeed_core.feature import hookimpl
from mindspeed_core.testing.training import SideResult, train_side
from mindspeed_core.testing.worlds import run_world

SHARDED = ("--bf16", "--use-distributed-optimizer", "--clip-grad", "0.5")
HALF = ("--grad-reduce-in-bf16",)
REUSE, RELEASE, COMPRESS = ("--reuse-fp32-param",), ("--release-fp32-grad",), ("--compress-optimizer",)
SWAP, VIRTUAL = ("--swap-optimizer",), ("--virtual-optimizer", "all")
KEPT = {
    "plain": (),
    "reuse": REUSE,
    "swap": SWAP,
    "virtual": VIRTUAL,
    "compress": COMPRESS,
    "reuse, virtual": (*REUSE, *VIRTUAL),
    "reuse, compress": (*REUSE, *COMPRESS),
    "16-bit gradients": HALF,
    "16-bit gradients, release": (*HALF, *RELEASE),
    "16-bit gradients, reuse": (*HALF, *REUSE),
}
"""Sides of part a."""


def kept_bytes() -> dict[str, Any]:
    """Count what a rank keeps, and what it has at most in a step."""
    found: dict[str, Any] = {}
    sides: dict[str, SideResult] = {}
    print(f"{'':<28}{'on the device':>15}{'on the host':>13}{'ratio':>8}{'peak of a step':>16}  parameters")
    for name, flags in KEPT.items():
        first = next(iter(sides.values()), None)
        side = train_side(
            (*SHARDED, *flags),
            2,
            3,
            initial=first.initial if first else None,
            gradients=False,
            measure=True,
            platform="cpu",
        )
        sides[name] = side
        plain = sides["16-bit gradients" if name.startswith("16") else "plain"]
        host = side.measures["host_bytes"]
        device = side.measures["optimizer_bytes"] - host
        ratio = device / plain.measures["optimizer_bytes"]
        peak = side.measures["step_peak_bytes"]
        same = side.losses == plain.losses and _equal(side, plain)
        found[name] = {"device": device, "host": host, "ratio": ratio, "step_peak": peak, "same_bits": same}
        bits = "the same bits" if same else "other bits"
        print(f"{name:<28}{device:>15,.0f}{host:>13,.0f}{ratio:>8.3f}{peak:>16,.0f}  {bits}")
    return found


def _equal(one: SideResult, other: SideResult) -> bool:
    ours, theirs = one.parameters.tensors, other.parameters.tensors
    return ours.keys() == theirs.keys() and all(bool((ours[key] == theirs[key]).all()) for key in ours)


_LLAMA = (
    *("--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear", "--position-embedding-type", "rope"),
    *("--untie-embeddings-and-output-weights", "--vocab-size", "32000"),
)
_TP8 = ("--tensor-model-parallel-size", "8", "--sequence-parallel")


def _model(layers: int, hidden: int, width: int, heads: int) -> tuple[str, ...]:
    return (
        *("--num-layers", str(layers), "--hidden-size", str(hidden), "--ffn-hidden-size", str(width)),
        *("--num-attention-heads", str(heads)),
    )


MODELS: dict[str, tuple[int, float | None, tuple[str, ...]]] = {
    "LLaMA-7B": (8, 13.5, (*_model(32, 4096, 11008, 32), *_LLAMA, *_TP8, "--seq-length", "2048")),
    "LLaMA-13B": (8, 14.9, (*_model(40, 5120, 13824, 40), *_LLAMA, *_TP8, "--seq-length", "2048")),
    "LLaMA2-7B": (8, 10.87, (*_model(32, 4096, 11008, 32), *_LLAMA, *_TP8, "--seq-length", "4096")),
    "Bloom-7B": (
        8,
        12.68,
        (*_model(30, 4096, 16384, 32), *_TP8, "--seq-length", "2048", "--vocab-size", "250880"),
    ),
    "LLaMA-32B": (
        16,
        15.93,
        (
            *(*_model(60, 6656, 17920, 52), *_LLAMA, "--seq-length", "2048"),
            *(
                "--tensor-model-parallel-size",
                "4",
                "--sequence-parallel",
                "--pipeline-model-parallel-size",
                "4",
            ),
        ),
    ),
    "LLaMA-7B, distributed": (
        8,
        9.5,
        (
            *(*_model(32, 4096, 11008, 32), *_LLAMA, "--seq-length", "2048"),
            *("--tensor-model-parallel-size", "2", "--sequence-parallel"),
        ),
    ),
}
"""Ranks, published share of memory that releasing float32 gradients saves, and flags of each model.

The published runs' batches and lengths are not all known; these are one micro-batch of the usual lengths.
"""
PLANS = {
    "plain": (),
    "reuse": REUSE,
    "swap": SWAP,
    "virtual": VIRTUAL,
    "16-bit gradients": HALF,
    "16-bit gradients, release": (*HALF, *RELEASE),
}


def planned(model: str, flags: Sequence[str]) -> dict[str, Any]:
    """Plan one rank of a model in a process of its own."""
    command = [sys.executable, __file__, "--plan", model, "--", *flags]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{model} {' '.join(flags)}: {result.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def plan_here(model: str, flags: Sequence[str]) -> dict[str, Any]:
    """Plan one rank of a model in this process, for two steps."""
    from mindspeed_core.activation import activate
    from mindspeed_core.hosts.standalone import loop
    from mindspeed_core.hosts.standalone.arguments.run_length import batch_at

    ranks, _, shape = MODELS[model]
    line = [
        *("--platform", "fake", "--fake-world-size", str(ranks), "--fake-rank", "0"),
        *(*shape, *SHARDED, *flags),
        *("--max-position-embeddings", "4096", "--micro-batch-size", "1", "--mock-data", "--lr", "1e-4"),
        *("--attention-dropout", "0", "--hidden-dropout", "0", "--use-cpu-initialization"),
        *("--train-iters", "2", "--eval-iters", "0", "--use-flash-attn"),
    ]
    with activate(line, host="standalone") as session:
        run = loop.setup(session)
        session.call("start_run", run=run)
        for _ in range(2):
            session.call("train_step", run=run)
            run.iteration += 1
            run.consumed_train_samples += batch_at(run.args, run.consumed_train_samples).samples
        storage: Any = session.platform.storage  # type: ignore[attr-defined]
        storage.end_phase()
        phases = {phase.name: phase for phase in storage.report(1)}
        parameters = sum(p.numel() for chunk in run.model for p in chunk.parameters())
        return {
            "parameters": parameters,
            "shards": run.pg.dp_cp.size(),
            "kinds": dict(phases["forward and backward"].kinds),
            "peak": phases["forward and backward"].peak,
            "update": phases["update"].peak,
            "host": storage.host,
        }


def published(models: Sequence[str]) -> dict[str, Any]:
    """Compare planned bytes with the formulas, and shares of memory with the published ones."""
    found: dict[str, Any] = {}
    for model in models:
        _, claimed, _ = MODELS[model]
        plans = {name: planned(model, flags) for name, flags in PLANS.items()}
        plain = plans["plain"]
        size, shards = plain["parameters"], plain["shards"]
        formulas = {
            "reuse": 10 * size / shards,
            "swap": 0.0,
            "virtual": 4 * size / shards,
            "plain": 12 * size / shards,
            "16-bit gradients": 12 * size / shards,
            "16-bit gradients, release": 12 * size / shards,
        }
        print(f"{model}: {size:,} parameters of a rank, {shards} shards (GiB)")
        rows = {}
        for name, plan in plans.items():
            kept = sum(plan["kinds"].get(kind, 0) for kind in ("main parameters", "optimizer state"))
            off = abs(kept - formulas[name]) / (12 * size / shards)
            rows[name] = {**plan, "kept": kept, "formula": formulas[name], "off": off}
            print(
                f"  {name:<28} kept {kept / 2**30:7.3f}, formula {formulas[name] / 2**30:7.3f} "
                f"({off:.2%} off), peaks: forward and backward {plan['peak'] / 2**30:7.3f}, update "
                f"{plan['update'] / 2**30:7.3f}"
            )
        half, released = plans["16-bit gradients"], plans["16-bit gradients, release"]
        copy = 4 * size / shards
        # The published optimizer kept the copy between steps.
        share = copy / (max(half["peak"], half["update"] - copy) + copy)
        whole = max(half["peak"], half["update"])
        saved = 1 - max(released["peak"], released["update"]) / whole
        step = half["update"] - released["update"]
        print(
            f"  a copy that is kept would be {share:.1%} of the memory (published {claimed} %); over "
            f"megatron-core: update {step / 2**30:.3f} GiB less (formula {copy / 2**30:.3f}), run "
            f"{saved:.1%} less"
        )
        found[model] = {"plans": rows, "kept_copy": share, "published": claimed, "run_saved": saved}
    return found


TIMED = (
    *("--num-layers", "4", "--hidden-size", "512", "--num-attention-heads", "8", "--seq-length", "128"),
    *("--max-position-embeddings", "128", "--vocab-size", "16384", "--global-batch-size", "1"),
    *("--bf16", "--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear"),
)
TOKENS, _TURNS, _STEPS = 16_384, 2, 4


class Clock:
    """Takes the seconds of updates."""

    def __init__(self) -> None:
        """Start without one."""
        self.updates: list[float] = []

    @hookimpl(wrapper=True)
    def optimizer_step(self) -> Iterator[None]:
        """Take the time of one."""
        start = time.perf_counter()
        result = yield
        self.updates.append(time.perf_counter() - start)
        return result  # type: ignore[return-value]


def timed(flags: Sequence[str]) -> dict[str, Any]:
    """Train on one process; return the shortest update and the rest of its step, and bytes."""
    from mindspeed_core.activation import activate
    from mindspeed_core.hosts.standalone import loop
    from mindspeed_core.instruments.kept_state import inner_optimizers, state_bytes
    from mindspeed_core.megatron.global_state import destroy_megatron_state
    from mindspeed_core.testing.model_flags import training_flags

    clock = Clock()
    line = training_flags((*TIMED, *flags), _STEPS)
    with activate(line, host="standalone", platform="cpu", extra_plugins=[clock]) as session:
        run = loop.setup(session)
        rest = []
        for _ in range(_STEPS):
            start = time.perf_counter()
            session.call("train_step", run=run)
            rest.append(time.perf_counter() - start - clock.updates[-1])
            run.iteration += 1
            run.consumed_train_samples += run.args.global_batch_size
        states = [state for inner in inner_optimizers(run.optimizer) for state in inner.state.values()]
        steps = sum(s["step"].nbytes for s in states if not isinstance(s.get("step", 0), int))
        ties = sum(s["ties"].nbytes for s in states if "ties" in s)
        found = {
            "parameters": sum(p.numel() for chunk in run.model for p in chunk.parameters()),
            "kept": state_bytes(run)["optimizer_bytes"] - ties - steps,
            "ties": ties,
            "update": min(clock.updates[1:]),
            "rest": min(rest[1:]),
        }
    destroy_megatron_state()
    return found


def split_masters() -> dict[str, Any]:
    """Count bytes a parameter, and time the update of split main parameters."""
    sides = {"plain": (), "reuse": REUSE, "reuse, signs": (*REUSE, "--reuse-fp32-ties", "sign")}
    best: dict[str, Any] = {}
    for _ in range(_TURNS):
        for name, flags in sides.items():
            found = run_world(timed, 1, flags)[0]
            before = best.get(name, found)
            best[name] = {**found, **{key: min(found[key], before[key]) for key in ("update", "rest")}}
    plain = best["plain"]
    tokens = 128
    for name, side in best.items():
        less = (plain["kept"] - side["kept"]) / plain["parameters"]
        extra = (side["update"] - plain["update"]) / (plain["rest"] / tokens * TOKENS + plain["update"])
        side |= {
            "bytes_less": less,
            "extra_of_a_step": extra,
            "ties_a_parameter": side["ties"] / plain["parameters"],
        }
        print(
            f"{name:<14} {less:.3f} bytes a parameter less, ties {side['ties_a_parameter']:.6f}; update "
            f"{side['update'] * 1e3:.1f} ms, {extra:+.2%} of a step of {TOKENS:,} tokens"
        )
    return best


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print tables, and write the numbers where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the numbers in benchmarks/results")
    parser.add_argument("--parts", default="abc", help="parts to run, of a, b and c")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="of part b")
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.plan:
        print(json.dumps(plan_here(options.plan, options.flags)))
        return 0
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "a": kept_bytes,
        "b": lambda: published(options.models),
        "c": split_masters,
    }
    results = {part: parts[part]() for part in options.parts}
    if options.write:
        print(f"written to {write('memory_optimizer', results).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
