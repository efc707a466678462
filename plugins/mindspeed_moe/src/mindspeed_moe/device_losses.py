"""Balance between devices that hold experts, and of what is sent to them (DeepSeek-V2, 2.1.2).

With ``n_d`` choices of experts of device ``d`` among ``T`` tokens of ``k`` choices each, ``m_d`` tokens that
choose any of them, and ``P_d`` the mean over tokens of the scores of these experts, the losses are
``D Σ n_d / (k T) P_d`` and ``D Σ m_d / (M T) P_d``, where ``M`` is the number of devices that a token may go
to. Both are 1 where everything is even. Only the scores have a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mindspeed_moe.options import DeviceLosses


def device_losses(
    scores: Tensor,
    routing_map: Tensor,
    valid: Tensor | None,
    options: DeviceLosses,
    total: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return this rank's share of the weighted sum of both losses.

    Args:
        scores: ``[T, E]``, normalized scores of this rank's tokens.
        routing_map: bool ``[T, E]``, the experts they go to.
        valid: bool ``[T]``, False for tokens that do not count; None where all do.
        options: coefficients, ``D``, ``k`` and ``M``.
        total: sums numbers over the ranks that share a sequence.

    Returns:
        A scalar, in float32 at least; its sum over the ranks that share a sequence is the loss.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if valid is not None:
        routing_map, scores = routing_map & valid.unsqueeze(1), scores * valid.unsqueeze(1)
    tokens = routing_map.shape[0] if valid is None else valid.sum()
    by_device = routing_map.unflatten(1, (options.devices, -1))
    counts = torch.cat(
        [
            by_device.sum((0, 2)),
            by_device.any(2).sum(0),
            torch.as_tensor(tokens, device=scores.device).view(1),
        ]
    )
    chosen, sent, everywhere = total(counts.to(scores.dtype)).split([options.devices, options.devices, 1])
    load = options.balance / options.choices * chosen + options.communication / options.reached * sent
    score = scores.unflatten(1, (options.devices, -1)).sum((0, 2))
    return options.devices * (load * score).sum() / everywhere.clamp_min(1).square().squeeze(0)
