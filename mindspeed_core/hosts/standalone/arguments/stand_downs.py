"""Flags that stand down: they choose how the same numbers are computed, and nothing here computes them so.

They leave the arguments before anything is built, each with a note, unless a feature has declared the flag.
Torch-free.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from typing import Any

from mindspeed_core.hosts.standalone.arguments.refusals import (
    REFUSALS,
    default_of,
    option_of,
    stands_against,
)
from mindspeed_core.upstream.notes import FlagNote

_PRECISIONS = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def stand_down(args: Namespace, claimed: Collection[str], kinds: Collection[str]) -> list[FlagNote]:
    """Set what nothing here can act on to its default, and say so; changes ``args``.

    Args:
        args: the parsed arguments.
        claimed: option strings that active features declare; those are theirs.
        kinds: the kinds of the platform.
    """
    return [*_layers(args), *_options(args, claimed, kinds)]


def _layers(args: Namespace) -> Iterator[FlagNote]:
    if args.transformer_impl == "transformer_engine" and find_spec("transformer_engine") is None:
        args.transformer_impl = "local"
        yield FlagNote(
            "--transformer-impl transformer_engine",
            "TransformerEngine is not installed; megatron-core's own layers compute the same",
        )


def _options(args: Namespace, claimed: Collection[str], kinds: Collection[str]) -> Iterator[FlagNote]:
    for refusal in REFUSALS:
        if not refusal.stands_down or not stands_against(refusal, args, kinds):
            continue
        flag = option_of(refusal.dest)
        if flag in claimed or (refusal.dest == "use_precision_aware_optimizer" and _lower_precision(args)):
            continue
        value: Any = getattr(args, refusal.dest)
        instead = default_of(refusal.dest) if refusal.instead is None else refusal.instead
        setattr(args, refusal.dest, list(instead) if isinstance(instead, tuple) else instead)
        words = "" if isinstance(value, bool) else f" {_typed(value)}"
        yield FlagNote(f"{flag}{words}", refusal.reason)


def _lower_precision(args: Namespace) -> bool:
    """Return whether the optimizer is to keep something in fewer bits, which changes numbers."""
    return any(getattr(args, dest, "fp32") != "fp32" for dest in _PRECISIONS)


def _typed(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
