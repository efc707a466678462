"""Compare offloading and recomputation of megatron-core's own with the flags of mindspeed-memory, in one run.

megatron-core's `fine_grained_activation_offloading` beside `--swap-attention`, and its `recompute_modules`
beside `--recompute-norm` and `--recompute-plan`: one small LLaMA on the cpu platform from the same weights,
the same parts of each layer. Device bytes are those of tensors in a step, host bytes those of the buffers
that each side keeps for its copies. Copies back to the device are followed as `copy_timeline` says: column
B/kFLOP is the speed of a link with which compute waits for at most a hundredth of the step. Times are the
median of a step, in which both sides really copy.

On a CPU megatron-core's offloading runs only through three replacements, made here: streams and events of
``torch.cuda`` are those of the cpu platform, the switch of TransformerEngine that it sets is a stand-in, and
since 0.19 its question for tensors of the type ``cuda`` has to be answered.
What it moves of experts needs TransformerEngine's classes of experts, and is not compared.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

from copy_timeline import Timeline, host_copies_followed, reloads_followed
from machine import write

from mindspeed_core.feature import hookimpl
from mindspeed_testing.training import SideResult, train_side

MIN_BYTES = 4096
SAME = 1e-5
"""Losses of recomputed norms differ by the order in which gradients are added."""
STEPS = 3
"""megatron-core moves everything in its first step, and what its plan says in all later ones."""
HOST, NEEDED = "host buffers of megatron-core", "needed bytes per operation"
ATTENTION = ("qkv_linear", "core_attn", "attn_proj")
NORMS = ("attn_norm", "mlp_norm")


class Offloading:
    """Follows the copies of the last compared step, and records in later ones what they need."""

    def __init__(self) -> None:
        """Follow nothing yet."""
        self._steps = 0
        self._needed = 0.0

    def followed(self, timeline: Timeline) -> AbstractContextManager[None]:
        """Follow the copies of mindspeed-memory."""
        return host_copies_followed(timeline)

    @hookimpl(wrapper=True)
    def train_step(self, run: Any) -> Iterator[None]:
        """Follow one step, and record what it needed."""
        self._steps += 1
        if self._steps == STEPS:
            timeline = Timeline()
            with self.followed(timeline), timeline.counted():
                result = yield
            self._needed = timeline.needed()
        else:
            result = yield
        run.metrics.add(NEEDED, self._needed)
        return result  # type: ignore[misc]


class CoreOffloading(Offloading):
    """Switches megatron-core's offloading on in the configuration, as a program of the user's does."""

    modules: ClassVar[Sequence[str]] = ATTENTION

    def followed(self, timeline: Timeline) -> AbstractContextManager[None]:
        """Follow the copies of megatron-core."""
        return reloads_followed(timeline)

    @hookimpl(wrapper=True)
    def build_transformer_config(self) -> Iterator[None]:
        """Set the fields, and replace what only CUDA and TransformerEngine have."""
        config: Any = yield
        stand_in_for_the_device()
        config.fine_grained_activation_offloading = True
        config.offload_modules = [*self.modules]
        config.min_offloaded_tensor_size = MIN_BYTES // 4
        return config  # type: ignore[misc]

    @hookimpl(wrapper=True)
    def optimizer_step(self, run: Any) -> Iterator[None]:
        """Record the bytes of its pool of host buffers."""
        result = yield
        from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

        pools = PipelineOffloadManager.get_instance()._cpu_tensor_pool._pools.values()
        kept = sum(tensor.untyped_storage().nbytes() for pool in pools for tensor in pool["all"])
        run.metrics.add(HOST, float(kept))
        return result  # type: ignore[misc]


class CoreOffloadingWithNorms(CoreOffloading):
    """The same with the inputs of both norms."""

    modules = (*ATTENTION, *NORMS)


def stand_in_for_the_device() -> None:
    """Let megatron-core's offloading run on tensors of the CPU, in a process that ends after its side."""
    import torch
    from megatron.core.extensions import transformer_engine
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import ChunkOffloadHandler

    def is_on_device(tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, torch.nn.Parameter)

    vars(transformer_engine)["cpu_offload"] = SimpleNamespace(CPUOffloadEnabled=False)
    if hasattr(ChunkOffloadHandler, "_can_manage_tensor_for_offload"):
        ChunkOffloadHandler._can_manage_tensor_for_offload = staticmethod(is_on_device)


class Side(NamedTuple):
    """One training.

    Attributes:
        flags: beside those of the model.
        probe: class of this file that is registered.
        base: the side of megatron-core, or of ours, that it is compared with.
    """

    flags: tuple[str, ...] = ()
    probe: str = ""
    base: str = "plain"


_SWAP = ("--swap-attention", "--swap-min-bytes", str(MIN_BYTES))
_SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules")
_ALONE, _BOTH = "megatron-core: attention offloaded", "megatron-core: attention and norms offloaded"
_NORMS, _MLP = "megatron-core: norms recomputed", "megatron-core: MLP recomputed"
SIDES = {
    "plain": Side(),
    _ALONE: Side(probe="CoreOffloading"),
    "--swap-attention --swap-modules self_attention": Side(
        (*_SWAP, "--swap-modules", "self_attention"), "Offloading", _ALONE
    ),
    "the same with --swap-prefetch-depth 0": Side(
        (*_SWAP, "--swap-modules", "self_attention", "--swap-prefetch-depth", "0"), "Offloading", _ALONE
    ),
    _BOTH: Side(probe="CoreOffloadingWithNorms"),
    "--swap-attention": Side(_SWAP, "Offloading", _BOTH),
    _NORMS: Side((*_SELECTIVE, "layernorm")),
    "--recompute-norm": Side(("--recompute-norm",), base=_NORMS),
    _MLP: Side((*_SELECTIVE, "mlp")),
    "--recompute-plan decoder.layers.{*}.mlp": Side(
        ("--recompute-plan", "decoder.layers.{*}.mlp"), base=_MLP
    ),
}


def model(hidden: int, tokens: int, layers: int) -> tuple[str, ...]:
    """Return the flags of a LLaMA with as many heads of 64 as fit."""
    return (
        *("--num-layers", str(layers), "--hidden-size", str(hidden)),
        *("--num-attention-heads", str(hidden // 64), "--ffn-hidden-size", str(hidden * 3)),
        *("--seq-length", str(tokens), "--max-position-embeddings", str(tokens), "--hidden-dropout", "0.1"),
        *("--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm"),
        *("--position-embedding-type", "rope", "--use-fused-rmsnorm", "--use-fused-swiglu"),
        *("--use-flash-attn", "--global-batch-size", "2", "--micro-batch-size", "1"),
    )


def trained(flags: Sequence[str], side: Side, initial: Any, timed: int) -> SideResult:
    """Train a side, and measure a further step; ``timed`` steps are taken besides."""
    return train_side(
        (*flags, *side.flags),
        1,
        STEPS,
        initial=initial,
        gradients=False,
        measure=True,
        timed_steps=timed,
        probes=(f"upstream_offloading:{side.probe}",) if side.probe else (),
        platform="cpu",
    )


def compare(flags: Sequence[str], rounds: int, timed: int) -> dict[str, Any]:
    """Train all sides in turns, so that no side has a quieter machine than another."""
    results: dict[str, SideResult] = {}
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    initial = None
    for _ in range(rounds):
        for name, side in SIDES.items():
            found = trained(flags, side, initial, timed)
            initial = initial or found.initial
            if timed:
                seconds[name].append(found.measures["step_seconds"])
            results.setdefault(name, found)
    rows: dict[str, Any] = {}
    for name, side in SIDES.items():
        measures, base = results[name].measures, results[side.base].measures
        kept = results[name].metrics.get(HOST, measures["host_bytes"])
        rows[name] = {
            "flags": side.flags,
            "base": side.base,
            "forward_bytes": measures["forward_bytes"],
            "peak_bytes": measures["peak_bytes"],
            "host_bytes": kept,
            "needed_bytes_per_operation": results[name].metrics.get(NEEDED),
            "ratio_of_forward_bytes": measures["forward_bytes"] / base["forward_bytes"],
            "ratio_of_peak": measures["peak_bytes"] / base["peak_bytes"],
            "largest_difference_of_losses": max(
                abs(one - other)
                for one, other in zip(
                    results[name].losses["lm loss"], results["plain"].losses["lm loss"], strict=True
                )
            ),
        }
        if timed:
            rows[name]["step_seconds"] = statistics.median(seconds[name])
            rows[name]["ratio_of_time"] = statistics.median(seconds[name]) / statistics.median(
                seconds[side.base]
            )
    return rows


def show(rows: dict[str, Any]) -> None:
    """Print the table; without timed steps, the columns of bytes alone."""
    timed = all("step_seconds" in row for row in rows.values())
    print(
        f"{'':<48}{'after forward':>14}{'peak':>13}{'host':>12}{'B/kFLOP':>9}{'fwd':>7}{'peak':>7}"
        + (f"{'s a step':>10}{'time':>7}" if timed else "")
        + "  beside"
    )
    for name, row in rows.items():
        needed = row["needed_bytes_per_operation"]
        print(
            f"{name:<48}{row['forward_bytes']:>14,.0f}{row['peak_bytes']:>13,.0f}{row['host_bytes']:>12,.0f}"
            f"{'' if needed is None else format(1000 * needed, '.3f'):>9}"
            f"{row['ratio_of_forward_bytes']:>7.3f}{row['ratio_of_peak']:>7.3f}"
            + (f"{row['step_seconds']:>10.4f}{row['ratio_of_time']:>7.3f}" if timed else "")
            + f"  {row['base']}"
            + ("  OTHER LOSSES" if row["largest_difference_of_losses"] > SAME else "")
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print the table, and write the numbers where that is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=512, help="width of the model")
    parser.add_argument("--tokens", type=int, default=512, help="length of a sequence")
    parser.add_argument("--layers", type=int, default=6, help="layers of the model")
    parser.add_argument("--rounds", type=int, default=3, help="trainings of each side")
    parser.add_argument(
        "--timed", type=int, default=5, help="timed steps of each training; 0 counts bytes alone"
    )
    parser.add_argument("--write", action="store_true", help="keep the numbers in benchmarks/results")
    options = parser.parse_args(argv)
    rows = compare(model(options.hidden, options.tokens, options.layers), options.rounds, options.timed)
    show(rows)
    if options.write:
        print(f"written to {write('upstream_offloading', {'model': vars(options), 'sides': rows}).name}")
    return 1 if any(row["largest_difference_of_losses"] > SAME for row in rows.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
