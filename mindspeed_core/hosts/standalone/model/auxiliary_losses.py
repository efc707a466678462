"""Losses that layers add to the gradient by themselves: balance of experts, predictions of further tokens.

megatron-core sums them per layer while micro-batches run, in trackers of its own; here they are averaged over
micro-batches, layers and ranks, under Megatron-LM's names. Its own reduction averages inside the collective,
which not every backend can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from mindspeed_core.runtime.losses import Losses, copied_later

if TYPE_CHECKING:
    from mindspeed_core.run import Run

_BALANCE = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


def auxiliary_losses(run: Run) -> Losses:
    """Return and reset the step's auxiliary losses by name, the same on every rank; collective."""
    found: list[Callable[[], dict[str, float]]] = []
    if run.config.num_moe_experts is not None:
        found.append(_expert_losses(run))
    if getattr(run.config, "mtp_num_layers", None):
        found.append(_prediction_losses(run))
    return Losses(lambda: {name: value for read in found for name, value in read().items()})


def _expert_losses(run: Run) -> Callable[[], dict[str, float]]:
    config = run.config
    kinds = config.moe_router_load_balancing_type
    names = [_BALANCE[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds) if kind in _BALANCE]
    if config.moe_z_loss_coeff is not None:
        names.append("z_loss")
    if not names:
        return dict
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        frequency = [int(layer % frequency == 0) for layer in range(config.num_layers)]
    layers = sum(frequency) + (config.mtp_num_layers or 0)
    tracker: dict[str, Any] = get_moe_layer_wise_logging_tracker()
    # A stage without expert layers takes part with zeros, and by the same rule as the others.
    totals = torch.stack([_sum(tracker.get(name, {}).get("values"), run) for name in names])
    _all_reduce(totals, run.pg.pp)
    # A rank reports its share of a balance loss, and the whole of the loss on its logits.
    _all_reduce(totals, run.pg.tp_cp, means=[name == "z_loss" for name in names])
    _all_reduce(totals, run.pg.dp, means=[name != _BALANCE["global_aux_loss"] for name in names])
    tracker.clear()
    values, microbatches = copied_later(totals, run.session.platform), run.args.num_microbatches
    return lambda: {name: value / microbatches / max(layers, 1) for name, value in zip(names, values())}


def _prediction_losses(run: Run) -> Callable[[], dict[str, float]]:
    tracker = MTPLossLoggingHelper.tracker
    values = tracker.get("values")
    if values is None:
        values = torch.zeros(run.config.mtp_num_layers, device=run.dist.device)
    values = values.float() / run.args.num_microbatches
    _all_reduce(values, run.pg.pp)
    _all_reduce(values, run.pg.dp_cp, means=[True])
    tracker.clear()
    read = copied_later(values, run.session.platform)
    return lambda: {f"mtp_{index + 1} loss": value for index, value in enumerate(read())}


def _sum(values: torch.Tensor | None, run: Run) -> torch.Tensor:
    return torch.zeros((), device=run.dist.device) if values is None else values.float().sum()


def _all_reduce(values: torch.Tensor, group: dist.ProcessGroup, means: Sequence[bool] = (False,)) -> None:
    """Sum ``values`` over the group, and divide those by its size that are to be a mean."""
    if group.size() > 1:
        dist.all_reduce(values, group=group)
        values /= values.new_tensor([group.size() if mean else 1 for mean in means])
