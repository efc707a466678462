"""Losses that layers add to the gradient by themselves: balance of experts, predictions of further tokens.

megatron-core sums them per layer while micro-batches run, in trackers of its own; here they are averaged over
micro-batches, layers and ranks, under Megatron-LM's names. Its own reduction averages inside the collective,
which not every backend can.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

if TYPE_CHECKING:
    from mindspeed_core.run import Run

_BALANCE = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


def auxiliary_losses(run: Run) -> dict[str, float]:
    """Return and reset the step's auxiliary losses by name, the same on every rank; collective."""
    losses: dict[str, float] = {}
    if run.config.num_moe_experts is not None:
        losses |= _expert_losses(run)
    if getattr(run.config, "mtp_num_layers", None):
        losses |= _prediction_losses(run)
    return losses


def _expert_losses(run: Run) -> dict[str, float]:
    config = run.config
    kinds = config.moe_router_load_balancing_type
    names = [_BALANCE[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds) if kind in _BALANCE]
    if config.moe_z_loss_coeff is not None:
        names.append("z_loss")
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        frequency = [int(layer % frequency == 0) for layer in range(config.num_layers)]
    layers = sum(frequency) + (config.mtp_num_layers or 0)
    tracker: dict[str, Any] = get_moe_layer_wise_logging_tracker()
    losses: dict[str, float] = {}
    for name in names:
        # A stage without expert layers takes part with zeros, and by the same rule as the others.
        total = _sum(tracker.get(name, {}).get("values"), run)
        _all_reduce(total, run.pg.pp)
        # A rank reports its share of a balance loss, and the whole of the loss on its logits.
        _all_reduce(total, run.pg.tp_cp, mean=name == "z_loss")
        _all_reduce(total, run.pg.dp, mean=name != _BALANCE["global_aux_loss"])
        losses[name] = float(total) / run.args.num_microbatches / max(layers, 1)
    tracker.clear()
    return losses


def _prediction_losses(run: Run) -> dict[str, float]:
    tracker = MTPLossLoggingHelper.tracker
    values = tracker.get("values")
    if values is None:
        values = torch.zeros(run.config.mtp_num_layers, device=run.dist.device)
    values = values.float() / run.args.num_microbatches
    _all_reduce(values, run.pg.pp)
    _all_reduce(values, run.pg.dp_cp, mean=True)
    tracker.clear()
    return {f"mtp_{index + 1} loss": value for index, value in enumerate(values.tolist())}


def _sum(values: torch.Tensor | None, run: Run) -> torch.Tensor:
    return torch.zeros((), device=run.dist.device) if values is None else values.float().sum()


def _all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, *, mean: bool = False) -> None:
    if group.size() > 1:
        dist.all_reduce(tensor, group=group)
        if mean:
            tensor /= group.size()
