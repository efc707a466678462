"""Flags that stand down: they choose how the same numbers are computed, and nothing here computes them so.

They leave the arguments before anything is built, each with a note, unless a feature has declared the flag.
Torch-free.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Collection, Iterator
from importlib.util import find_spec
from typing import Any

from mindspeed_core.flags.notes import FlagNote
from mindspeed_train.arguments.refusals import (
    REFUSALS,
    default_of,
    option_of,
    stands_against,
)

_PRECISIONS = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def stand_down_before_plan(args: Namespace, claimable: Callable[[str, Any], bool]) -> list[FlagNote]:
    """Set what no installed package can act on to its default before features are chosen by it.

    Args:
        args: the parsed arguments; changed.
        claimable: says whether an installed feature declares an option, and with choices this one of them.
    """
    return [*_layers(args), *_whole_experts(args), *_options(args, claimable, None)]


def stand_down(args: Namespace, claimed: Collection[str], kinds: Collection[str]) -> list[FlagNote]:
    """Set what no active feature acts on to its default, and say so; changes ``args``.

    Args:
        args: the parsed arguments.
        claimed: option strings that active features declare; those are theirs.
        kinds: the kinds of the platform.
    """

    def claims(option: str, value: Any) -> bool:
        return option in claimed

    return [*_sharded_experts(args, claims), *_options(args, claims, kinds)]


def _layers(args: Namespace) -> Iterator[FlagNote]:
    if args.transformer_impl == "transformer_engine" and find_spec("transformer_engine") is None:
        args.transformer_impl = "local"
        yield FlagNote(
            "--transformer-impl transformer_engine",
            "TransformerEngine is not installed; megatron-core's own layers compute the same",
        )


def _whole_experts(args: Namespace) -> Iterator[FlagNote]:
    """Leave experts with biases whole, which megatron-core does not cut: another layout of the same model."""
    tensor = args.tensor_model_parallel_size
    cut = tensor is not None and tensor > 1 and args.expert_tensor_parallel_size is None
    if args.num_experts and args.add_bias_linear and cut:
        args.expert_tensor_parallel_size = 1
        yield FlagNote(
            f"--tensor-model-parallel-size {tensor}",
            "experts with biases are not cut in megatron-core, and each rank holds its own whole; "
            "--disable-bias-linear cuts them",
            f"--tensor-model-parallel-size {tensor} --expert-tensor-parallel-size 1",
        )


def _sharded_experts(args: Namespace, claimed: Callable[[str, Any], bool]) -> Iterator[FlagNote]:
    if args.moe_grouped_gemm and args.use_megatron_fsdp and not claimed("--moe-grouped-gemm", True):
        args.moe_grouped_gemm = False
        yield FlagNote(
            "--moe-grouped-gemm",
            "--use-megatron-fsdp shards the weights of each expert, and experts run one after the other",
        )


def _options(
    args: Namespace, claimed: Callable[[str, Any], bool], kinds: Collection[str] | None
) -> Iterator[FlagNote]:
    """Let options stand down; without ``kinds`` the platform is not chosen yet, and its own wait."""
    for refusal in REFUSALS:
        if not refusal.stands_down or (kinds is None and refusal.platforms):
            continue
        if not stands_against(refusal, args, kinds or ()):
            continue
        value: Any = getattr(args, refusal.dest)
        flag = option_of(refusal.dest)
        if claimed(flag, value) or _means_more(refusal.dest, args):
            continue
        instead = default_of(refusal.dest) if refusal.instead is None else refusal.instead
        setattr(args, refusal.dest, list(instead) if isinstance(instead, tuple) else instead)
        words = "" if isinstance(value, bool) else f" {_typed(value)}"
        yield FlagNote(f"{flag}{words}", refusal.reason)


def _means_more(dest: str, args: Namespace) -> bool:
    """Return whether another flag makes an option one that changes numbers, or one that is needed."""
    if dest == "use_precision_aware_optimizer":
        # The optimizer is to keep something in fewer bits.
        return any(getattr(args, name, "fp32") != "fp32" for name in _PRECISIONS)
    return dest == "hierarchical_context_parallel_sizes" and args.transformer_impl == "transformer_engine"


def _typed(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
