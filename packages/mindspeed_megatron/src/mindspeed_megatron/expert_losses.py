"""Weight of the losses that routers add to the gradient: that of one process, on every layout.

A loss of experts is a mean over micro-batches and data-parallel ranks, whether or not the model's own loss is
one over tokens; a coefficient multiplies its gradient. megatron-core has the same in mind, and misses it:

- with ``--calculate-per-token-loss`` a rank multiplies by its own tokens what is divided by the tokens of the
  step that count, so that masked tokens and ranks that share a sequence change the weight, and the balance of
  single sequences by the samples of a micro-batch;
- the balance over all data-parallel ranks is averaged over them once more.

Routers of a built model are corrected here, whoever built it. A router of your own attaches its loss with
``attach_and_log_load_balancing_loss``, or multiplies it by `expert_loss_weight`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    save_to_aux_losses_tracker,
    z_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from mindspeed_megatron.step_tokens import StepTokens
from mindspeed_megatron.unwrap import unwrap

if TYPE_CHECKING:
    from mindspeed_core.session import Session

_ATTACH = "attach_and_log_load_balancing_loss"
_OWNER = "losses of experts"

Weight = Callable[[int], "Tensor | float"]


def weigh_expert_losses(session: Session, model: Iterable[Any]) -> None:
    """Give the losses of the routers in built chunks their weight. Call it once or several times.

    Args:
        session: the open session.
        model: chunks, wrapped or not.
    """
    for chunk in model:
        for module in unwrap(chunk).modules():
            if isinstance(module, TopKRouter) and not hasattr(getattr(module, _ATTACH), "weight"):
                _correct(session, module)


def expert_loss_weight(router: TopKRouter, tokens: int) -> Tensor | float:
    """Return by how much a loss that a router attaches by itself is multiplied, beside its coefficient.

    Args:
        router: in a model that a session knows; it attaches the share of the micro-batch's loss that its
            rank's tokens have, with ``MoEAuxLossAutoScaler``.
        tokens: of this rank in the micro-batch, those that do not count included.
    """
    weight: Weight | None = getattr(getattr(router, _ATTACH), "weight", None)
    if weight is not None:
        return weight(tokens)
    # Outside of a session: the tokens of the micro-batch, those of all ranks that share its sequences.
    return float(tokens * router.tp_cp_group.size()) if router.config.calculate_per_token_loss else 1.0


def _correct(session: Session, router: Any) -> None:
    per_token = router.config.calculate_per_token_loss
    plain = getattr(type(router), _ATTACH)
    plain_routing = type(router).routing
    samples = [1]
    ranks = router.tp_cp_group.size()

    def weight(tokens: int) -> Tensor | float:
        if not per_token:
            return 1.0
        now = session.state(StepTokens).now
        # A loop without a schedule divides by its own count: the tokens of all ranks that share a sequence.
        if now is None:
            return float(tokens * ranks)
        return now.divisor * (samples[0] / now.samples)

    def attach(
        self: Any,
        activation: Tensor,
        aux_loss_coeff: float,
        aux_loss: Tensor,
        aux_loss_name: str,
        reduce_group: Any,
        reduce_group_has_dp: bool = False,
        valid_token_count: Any = None,
        **further: Any,
    ) -> Tensor:
        """Attach a rank's share of a loss to probabilities, with the weight of one process."""
        factor = weight(activation.shape[0])
        if reduce_group_has_dp:
            factor = factor * (reduce_group.size() // self.tp_cp_group.size())
        # What is reported is divided by the coefficient.
        attached: Tensor = plain(
            self,
            activation,
            aux_loss_coeff * factor,
            aux_loss * factor,
            aux_loss_name,
            reduce_group,
            reduce_group_has_dp=reduce_group_has_dp,
            **further,
        )
        return attached

    def apply_z_loss(self: Any, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Attach the loss on the size of logits ``[tokens, experts]``."""
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or not (self.training and torch.is_grad_enabled()):
            return logits
        share = coefficient / self.tp_cp_group.size()
        masked = {} if padding_mask is None else {"padding_mask": padding_mask}
        loss = z_loss_func(logits, share, **masked)
        logits = MoEAuxLossAutoScaler.apply(logits, loss * weight(logits.shape[0]))
        layers = self.config.num_layers + (self.config.mtp_num_layers or 0)
        # It is a mean over this rank's tokens.
        everyone = self.tp_dp_cp_group
        save_to_aux_losses_tracker("z_loss", loss / share, self.layer_number, layers, avg_group=everyone)
        return logits

    def routing(self: Any, logits: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """Route ``[s, b, experts]``; losses weigh by samples where micro-batches differ in them."""
        samples[0] = logits.shape[1]
        routed: tuple[Tensor, Tensor] = plain_routing(self, logits, *rest, **named)
        return routed

    attach.weight = weight  # type: ignore[attr-defined]
    for name, value in {
        # The weight is that of `weight` alone.
        "calculate_per_token_loss": False,
        _ATTACH: MethodType(attach, router),
        "apply_z_loss": MethodType(apply_z_loss, router),
        "routing": MethodType(routing, router),
    }.items():
        session.instances.set(_OWNER, router, name, value)
