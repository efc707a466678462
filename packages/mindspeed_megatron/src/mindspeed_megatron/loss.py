"""Between a script's loss function and the record that stages pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_core.run import Loss
from mindspeed_core.runtime.gather import all_gather_values


def on_every_stage(losses: dict[str, float], pp: dist.ProcessGroup) -> dict[str, float]:
    """Return the losses on every pipeline stage, from the one that has them; collective over ``pp``."""
    # The loss is on the last rank in the usual placement of stages; a feature may place them otherwise.
    return next((found for found in all_gather_values(losses, pp) if found), {})


def loss_of(result: Sequence[Any]) -> Loss:
    """Return the record of what a loss function returned.

    That is ``(loss, num_tokens, report)``; or ``(loss, report)``, where the loss is a mean already and
    counts as one token.
    """
    if len(result) == 3:
        return Loss(*result)
    total, report = result
    return Loss(total, torch.ones((), dtype=torch.int, device=total.device), report, True)


def is_mean(loss: Loss, given: Loss | None) -> bool:
    """Return whether a loss is a mean: that of the loss function, or one that a feature made of it.

    Args:
        loss: what the stage returned.
        given: what the loss function returned, None where a feature took its place.
    """
    # A feature may have built a new record of a mean and its count of one.
    return loss.averaged or (given is not None and given.averaged and loss.num_tokens is given.num_tokens)


def schedule_loss(loss: Loss, *, averaged: bool = False) -> tuple[Any, ...]:
    """Return a loss in the form that megatron-core's schedules take; that of a mean counts no tokens."""
    # The schedule divides the loss in place, so what is reported must not share its memory.
    report = {name: value.detach().to(torch.float32, copy=True) for name, value in loss.report.items()}
    return (loss.total, report) if averaged else (loss.total, loss.num_tokens.to(torch.int), report)
