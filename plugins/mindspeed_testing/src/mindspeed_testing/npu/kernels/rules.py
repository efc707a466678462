"""Rules that several contracts share, each with the sentence that says it."""

from __future__ import annotations

from collections.abc import Collection

import torch

from mindspeed_testing.npu.kernels.contract import Arguments, Rule

HALF = (torch.float16, torch.bfloat16)
FLOATING = (*HALF, torch.float32)


def off(name: str) -> Rule:
    """Return the rule that a switch is off."""
    return Rule(f"{name} is off", lambda a: not a[name])


def of_dtypes(name: str, rank: int, text: str, dtypes: Collection[torch.dtype] = FLOATING) -> Rule:
    """Return the rule that a tensor, where it is given, has one of some dtypes and a rank."""
    return Rule(text, lambda a: a[name] is None or (a[name].dim() == rank and a[name].dtype in dtypes))


def both_half(first: str, second: str) -> Rule:
    """Return the rule that two operands have the same half precision."""
    return Rule(
        f"{first} and {second} both float16 or both bfloat16",
        lambda a: a[first].dtype in HALF and a[first].dtype == a[second].dtype,
    )


def accumulated(name: str) -> Rule:
    """Return the rule that what is added to is float32, row after row."""
    return Rule(
        f"{name} is float32 and contiguous",
        lambda a: a[name].dtype == torch.float32 and a[name].is_contiguous(),
    )


def not_empty(text: str, *names: str) -> Rule:
    """Return the rule that tensors have elements."""
    return Rule(text, lambda a: all(a[name].numel() > 0 for name in names))


def one_dtype(*names: str) -> Rule:
    """Return the rule that tensors, those that are given, have one dtype."""

    def holds(a: Arguments) -> bool:
        return len({a[name].dtype for name in names if a[name] is not None}) == 1

    return Rule(f"{', '.join(names)} have one dtype", holds)
