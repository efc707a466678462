"""Default of the losses of a step: what micro-batches reported, and what layers added to the gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mindspeed_core.feature import hookimpl
from mindspeed_megatron import loss_reduction
from mindspeed_megatron.layer_losses import layer_losses

if TYPE_CHECKING:
    import torch

    from mindspeed_core.run import Run
    from mindspeed_core.session import Session
    from mindspeed_megatron.losses import Losses


@hookimpl(trylast=True)
def reduce_losses(
    session: Session, run: Run, reports: Sequence[Mapping[str, torch.Tensor]], training: bool
) -> Losses:
    """Reduce reports by Megatron-LM's rule, and in training the losses of layers."""
    losses = loss_reduction.reduce_losses(session, run, reports, training)
    return losses | layer_losses(run) if training else losses
