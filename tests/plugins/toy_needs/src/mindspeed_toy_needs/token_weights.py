"""A weighted loss whose rule is an extension point: packages contribute functions by name.

A rule takes labels ``[b, s]`` and returns the weight of each token, ``[b, s]`` float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import ArgumentError
from mindspeed_core.feature import DeclarationError

if TYPE_CHECKING:
    import torch

    from mindspeed_core.run import Batch, Loss
    from mindspeed_core.session import Session

Rule = Callable[["torch.Tensor"], "torch.Tensor"]


def check_rule(contributed: Any) -> None:
    """Refuse what is no function."""
    if not callable(contributed):
        raise DeclarationError(f"a weight rule is a function of the labels, not {contributed!r}")


def uniform(labels: torch.Tensor) -> torch.Tensor:
    """Every token counts the same."""
    return labels.float() * 0.0 + 1.0


def rule(session: Session, name: str) -> Rule:
    """The rule of that name, of any installed package."""
    rules = session.registry.extensions("toy.weight-rules")
    if name not in rules:
        raise ArgumentError("--toy-token-weights", name, f"there are {', '.join(sorted(rules))}")
    found: Rule = rules[name]
    return found


def weighted_loss(token_losses: torch.Tensor, batch: Batch, weights: torch.Tensor) -> Loss:
    """Sum of the weighted losses ``[b, s]`` over the unmasked tokens; masked tokens do not count."""
    import torch

    from mindspeed_core.run import Loss

    assert batch.loss_mask is not None
    total = (token_losses.float() * batch.loss_mask * weights).sum()
    tokens = batch.loss_mask.sum()
    plain = (token_losses.detach().float() * batch.loss_mask).sum()
    report = {"lm loss": torch.stack([plain, tokens]), "weighted loss": torch.stack([total.detach(), tokens])}
    return Loss(total, tokens, report)
