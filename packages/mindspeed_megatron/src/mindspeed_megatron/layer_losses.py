"""Losses that layers add to the gradient by themselves: balance of experts, predictions of further tokens.

megatron-core sums them per layer while micro-batches run, in trackers of its own; here they are averaged over
micro-batches, layers and ranks, under Megatron-LM's names. Its own reductions take up to three collectives a
loss, and average inside of them, which not every backend can: here each rank scales its share, and one sum
over all ranks gives every loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor

from mindspeed_megatron.losses import Losses, copied_later
from mindspeed_megatron.step_tokens import StepTokens

if TYPE_CHECKING:
    from mindspeed_core.run import Run


def take_expert_losses() -> dict[str, Tensor]:
    """Return the collected losses ``[layers]`` by name, and begin anew."""
    # From 0.18 on the dictionary of earlier versions is a copy, which forgets nothing.
    record: Any = getattr(moe_utils, "get_moe_metrics_tracker", None)
    if record is not None:
        metrics = record().metrics
        found = {name: entry.values for name, entry in metrics.items()}
    else:
        metrics = moe_utils.get_moe_layer_wise_logging_tracker()
        found = {name: entry["values"] for name, entry in metrics.items() if "values" in entry}
    metrics.clear()
    return found


_BALANCE = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


@dataclass(frozen=True)
class LayerLosses:
    """A rank's shares of a step's losses of layers.

    Attributes:
        names: of the losses, the same on every rank.
        shares: ``[names + counted]`` float32; summed over all ranks of the world the first are the losses.
        counted: the last of these losses are sums over tokens, whose numbers follow the losses.
    """

    names: tuple[str, ...]
    shares: torch.Tensor
    counted: int = 0

    def read_by(self, values: Callable[[], list[float]]) -> Losses:
        """Return the losses, whose sums ``values`` reads when somebody looks at one."""

        def means() -> dict[str, float]:
            found, alone = values(), len(self.names) - self.counted
            divided = zip(found[alone : len(self.names)], found[len(self.names) :], strict=True)
            return dict(
                zip(self.names, (*found[:alone], *(total / max(count, 1.0) for total, count in divided)))
            )

        return Losses(means)


def own_layer_losses(run: Run) -> LayerLosses | None:
    """Return this rank's shares of the step's losses of layers, and reset the trackers; None without such.

    Those of experts are means over micro-batches, those of further predictions over their tokens.
    """
    config, pg = run.config, run.pg
    names: list[str] = []
    shares: list[torch.Tensor] = []
    if config.num_moe_experts is not None:
        names += _names_of_experts(config)
        shares += _shares_of_experts(run, names)
    ahead = getattr(config, "mtp_num_layers", None) or 0
    weight = 1.0 / run.args.num_microbatches
    shares = [share * weight for share in shares]
    if ahead:
        names += [f"mtp_{index + 1} loss" for index in range(ahead)]
        known = run.session.state(StepTokens)
        # Ranks of one sequence, cut by tensor parallelism, have the same.
        once = 1.0 if pg.tp.rank() == 0 else 0.0
        zeros = [torch.zeros((), device=run.dist.device)] * ahead
        for values in (known.sums, known.counts):
            shares += [value.float() * once for value in (values or zeros)]
        MTPLossLoggingHelper.tracker.clear()
    if not names:
        return None
    return LayerLosses(tuple(names), torch.stack(shares), ahead)


def layer_losses(run: Run) -> Losses:
    """Return and reset the step's losses of layers, the same on every rank, in one collective for all."""
    own = own_layer_losses(run)
    if own is None:
        return Losses(dict)
    if run.dist.world_size > 1:
        dist.all_reduce(own.shares)
    return own.read_by(copied_later(own.shares, run.session.platform))


def _names_of_experts(config: Any) -> list[str]:
    kinds = config.moe_router_load_balancing_type
    names = [_BALANCE[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds) if kind in _BALANCE]
    return [*names, "z_loss"] if config.moe_z_loss_coeff else names


def _shares_of_experts(run: Run, names: list[str]) -> list[torch.Tensor]:
    """Return the shares of losses of experts; a stage without expert layers has zeros."""
    config, pg = run.config, run.pg
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        frequency = [int(layer % frequency == 0) for layer in range(config.num_layers)]
    layers = max(sum(frequency) + (config.mtp_num_layers or 0), 1)
    collected = take_expert_losses() if names else {}
    shares = []
    for name in names:
        values = collected.get(name)
        total = torch.zeros((), device=run.dist.device) if values is None else values.float().sum()
        # A rank has its share of a balance loss, and the whole of the loss on its logits.
        alike = pg.tp_cp.size() if name == "z_loss" else 1
        replicas = pg.dp.size() if name != _BALANCE["global_aux_loss"] else 1
        shares.append(total / (layers * alike * replicas))
    return shares
