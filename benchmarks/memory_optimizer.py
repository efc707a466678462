"""Measure what the optimizer's features of mindspeed-memory save, each beside plain AdamW in the same run.

The second half of part a of `memory.py` trains a small GPT on two processes and counts bytes that a rank
keeps. Part b plans published models, one rank of each in shapes alone, and compares measured bytes with the
formulas. Part c counts the bytes a parameter that split main parameters take, and times their update; its
times are this machine's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mindspeed_core.feature import hookimpl
from mindspeed_testing.training import SideResult, train_side
from mindspeed_testing.worlds import run_world

_FORMULA, _EXTRA = 0.01, 0.01
_LONGEST = 1800.0
"""Seconds for one plan."""
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
        found[name] = {
            "device": device,
            "host": host,
            "ratio": device / plain.measures["optimizer_bytes"],
            "step_peak": side.measures["step_peak_bytes"],
            "same_bits": side.losses == plain.losses and _equal(side, plain),
        }
    return found


def show_kept_bytes(found: dict[str, Any]) -> None:
    """Print the table."""
    print(f"{'':<28}{'on the device':>15}{'on the host':>13}{'ratio':>8}{'peak of a step':>16}")
    for name, row in found.items():
        print(
            f"{name:<28}{row['device']:>15,.0f}{row['host']:>13,.0f}{row['ratio']:>8.3f}"
            f"{row['step_peak']:>16,.0f}{'' if row['same_bits'] else '  OTHER BITS'}"
        )


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
_COPIES, _RELEASED = "16-bit gradients", "16-bit gradients, release"
PLANS = {
    "plain": (),
    "reuse": REUSE,
    "swap": SWAP,
    "virtual": VIRTUAL,
    _COPIES: HALF,
    _RELEASED: (*HALF, *RELEASE),
}


def on_first_rank(function: Callable[[list[str]], Any], model: str, flags: Sequence[str]) -> Any:
    """Call a function with the command line of a dry run of a model, in a process of its first rank."""
    ranks, _, shape = MODELS[model]
    line = [
        *("--platform", "fake", *shape, *SHARDED, *flags),
        *("--max-position-embeddings", "4096", "--micro-batch-size", "1", "--mock-data", "--lr", "1e-4"),
        *("--attention-dropout", "0", "--hidden-dropout", "0", "--use-cpu-initialization"),
        *("--train-iters", "2", "--eval-iters", "0", "--use-flash-attn"),
    ]
    return run_world(function, 1, line, timeout=_LONGEST, env={"WORLD_SIZE": str(ranks)})[0]


def planned(line: list[str]) -> dict[str, Any]:
    """Plan one rank for two steps."""
    from mindspeed_core.activation import activate
    from mindspeed_train import loop
    from mindspeed_train.arguments.run_length import batch_at

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
    plans = {
        model: {name: on_first_rank(planned, model, flags) for name, flags in PLANS.items()}
        for model in models
    }
    return {model: beside_formulas(model, found) for model, found in plans.items()}


def beside_formulas(model: str, plans: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plans of a model with what formulas say of them.

    What lasts is compared at the peak of forward and backward, but for plain 16-bit gradients: their float32
    copies are still there when a step begins, and that may be the peak.
    """
    size, shards = plans["plain"]["parameters"], plans["plain"]["shards"]
    share_of_rank = {"reuse": 10, "swap": 0, "virtual": 4}
    rows = {}
    for name, plan in plans.items():
        kinds = plan["kinds"]
        kept = sum(kinds.get(kind, 0) for kind in ("main parameters", "optimizer state"))
        formula = share_of_rank.get(name, 12) * size / shards
        row = {**plan, "kept": kept, "formula": formula, "off": abs(kept - formula) / (12 * size / shards)}
        if name != _COPIES:
            row["lasting"] = kept + kinds["parameters"] + kinds["gradients"]
            row["lasting_formula"] = formula + (4 if name == _RELEASED else 6) * size
            row["off"] = max(row["off"], abs(row["lasting"] / row["lasting_formula"] - 1))
        rows[name] = row
    half, released = plans[_COPIES], plans[_RELEASED]
    copy = 4 * size / shards
    # Where the copy is kept between steps it stands beside whatever is the peak without it.
    share = copy / (max(released["peak"], half["update"] - copy) + copy)
    whole = max(half["peak"], half["update"])
    return {
        "plans": rows,
        "kept_copy": share,
        "published": MODELS[model][1],
        "copy_bytes": copy,
        "update_saved_bytes": half["update"] - released["update"],
        "run_saved": 1 - max(released["peak"], released["update"]) / whole,
    }


def show_published(found: dict[str, Any]) -> None:
    """Print the table."""
    for model, row in found.items():
        plain = row["plans"]["plain"]
        print(f"{model}: {plain['parameters']:,} parameters of a rank, {plain['shards']} shards (GiB)")
        for name, plan in row["plans"].items():
            lasting = f"{plan['lasting'] / 2**30:7.3f}" if "lasting" in plan else f"{'':7}"
            print(
                f"  {name:<28} optimizer {plan['kept'] / 2**30:7.3f}, formula "
                f"{plan['formula'] / 2**30:7.3f}; all that lasts {lasting} ({plan['off']:.2%} off); "
                f"peaks: forward and backward {plan['peak'] / 2**30:7.3f}, update "
                f"{plan['update'] / 2**30:7.3f}"
            )
        print(
            f"  a copy that is kept would be {row['kept_copy']:.1%} of the memory (published "
            f"{row['published']} %); over megatron-core: update {row['update_saved_bytes'] / 2**30:.3f} GiB "
            f"less (copies {row['copy_bytes'] / 2**30:.3f}), run {row['run_saved']:.1%} less"
        )


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
    from mindspeed_megatron.instruments.kept_state import inner_optimizers, state_bytes
    from mindspeed_testing.model_flags import training_flags
    from mindspeed_train import loop

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
        loop.teardown(session)
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
    for side in best.values():
        extra = (side["update"] - plain["update"]) / (plain["rest"] / tokens * TOKENS + plain["update"])
        side |= {
            "bytes_less": (plain["kept"] - side["kept"]) / plain["parameters"],
            "extra_of_a_step": extra,
            "ties_a_parameter": side["ties"] / plain["parameters"],
        }
    return best


def show_split_masters(best: dict[str, Any]) -> None:
    """Print the table."""
    for name, side in best.items():
        print(
            f"{name:<14} {side['bytes_less']:.3f} bytes a parameter less, ties "
            f"{side['ties_a_parameter']:.6f}; update {side['update'] * 1e3:.1f} ms, "
            f"{side['extra_of_a_step']:+.2%} of a step of {TOKENS:,} tokens"
        )


def missed_formulas(found: dict[str, Any]) -> list[str]:
    """Return plans whose bytes are further than 1 % from the formulas, and shares below published ones."""
    lines = [
        f"{model}, {name}: {plan['off']:.2%} off the formula"
        for model, row in found.items()
        for name, plan in row["plans"].items()
        if plan["off"] > _FORMULA
    ]
    return lines + [
        f"{model}: copies are {row['kept_copy']:.1%} of the memory, {row['published']} % published"
        for model, row in found.items()
        if 100 * row["kept_copy"] < row["published"]
    ]


def missed_split(best: dict[str, Any]) -> list[str]:
    """Return the forms that save less than 2 bytes a parameter, or take 1 % of a step or more."""
    return [
        f"{name}: {side['bytes_less']:.3f} bytes a parameter less, {side['extra_of_a_step']:+.2%} of a step"
        for name, side in best.items()
        if name != "plain" and (round(side["bytes_less"], 3) != 2 or side["extra_of_a_step"] >= _EXTRA)
    ]
