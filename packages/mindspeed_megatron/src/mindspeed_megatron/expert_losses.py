"""Weight of the losses that routers add to the gradient: that of one process, on every layout.

A loss of experts is a mean over micro-batches and data-parallel ranks, whether or not the model's own loss is
one over tokens; a coefficient multiplies its gradient. megatron-core has the same in mind, and misses it:

- with ``--calculate-per-token-loss`` a rank multiplies by its own tokens what is divided by the tokens of the
  step that count, so that masked tokens and ranks that share a sequence change the weight, and the balance of
  single sequences by the samples of a micro-batch;
- the balance over all data-parallel ranks is averaged over them once more;
- with positions that are no tokens the loss on logits is a mean over the tokens of each rank that shares a
  sequence, however few, the balance of single sequences measures all by their mean length, an expert bias
  does not get through, and such positions go to experts all the same.

Routers of a built model are corrected here, whoever built it. A router of your own attaches its loss with
``attach_and_log_load_balancing_loss``, or multiplies it by `expert_loss_weight`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    save_to_aux_losses_tracker,
    z_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from mindspeed_megatron.row_counts import count_rows
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
        modules = list(unwrap(chunk).modules())
        layers = {id(module.router): module for module in modules if hasattr(module, "router")}
        for module in modules:
            if isinstance(module, TopKRouter) and not hasattr(getattr(module, _ATTACH), "weight"):
                dispatcher = getattr(layers.get(id(module)), "token_dispatcher", None)
                _correct(session, module, count_rows(session, _OWNER, dispatcher))


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


def _correct(session: Session, router: Any, may_choose_fewer: Callable[[bool], None]) -> None:
    per_token = router.config.calculate_per_token_loss
    plain = getattr(type(router), _ATTACH)
    says_opposite = "needs_dp_avg" in signature(TopKRouter.attach_and_log_load_balancing_loss).parameters
    plain_routing, plain_sequences = type(router).routing, type(router)._apply_seq_aux_loss
    # megatron-core 0.15 knows no padding.
    plain_bias = getattr(type(router), "_apply_expert_bias", None)
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
        needs_dp_avg: bool = True,
        **further: Any,
    ) -> Tensor:
        """Attach a rank's share of a loss to probabilities, with the weight of one process."""
        factor = weight(activation.shape[0])
        # Newer versions say the opposite of the group.
        over_all = reduce_group_has_dp or not needs_dp_avg
        reports = {"needs_dp_avg": not over_all} if says_opposite else {"reduce_group_has_dp": over_all}
        if over_all:
            factor = factor * (reduce_group.size() // self.tp_cp_group.size())
        # What is reported is divided by the coefficient.
        attached: Tensor = plain(
            self,
            activation,
            aux_loss_coeff * factor,
            aux_loss * factor,
            aux_loss_name,
            reduce_group,
            **reports,
            **further,
        )
        return attached

    def apply_z_loss(self: Any, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Attach the loss on the size of logits ``[tokens, experts]``."""
        coefficient = self.config.moe_z_loss_coeff
        # A coefficient of 0 asks for none: what is reported is divided by it.
        if not coefficient or not (self.training and torch.is_grad_enabled()):
            return logits
        share = coefficient / self.tp_cp_group.size()
        if padding_mask is None:
            loss = z_loss_func(logits, share)
        else:
            loss = coefficient * _mean_square(logits, ~padding_mask, self.tp_cp_group)
        logits = MoEAuxLossAutoScaler.apply(logits, loss * weight(logits.shape[0]))
        layers = self.config.num_layers + (self.config.mtp_num_layers or 0)
        # Each rank reports its share, times their number.
        everyone = self.tp_dp_cp_group
        save_to_aux_losses_tracker("z_loss", loss / share, self.layer_number, layers, avg_group=everyone)
        return logits

    def balance_sequences(
        self: Any,
        probs: Tensor,
        scores: Tensor,
        routing_map: Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> Tensor:
        """Attach the mean balance of sequences, each over its own tokens."""
        coefficient = self.get_aux_loss_coeff("seq_aux_loss")
        if not with_padding_mask or not coefficient:
            unmasked: Tensor = plain_sequences(self, probs, scores, routing_map, seq_length, bsz)
            return unmasked
        shape = (seq_length, bsz, -1)
        loss = _balance_of_sequences(scores.view(shape), routing_map.view(shape), self) * coefficient
        attached: Tensor = self.attach_and_log_load_balancing_loss(
            probs, coefficient, loss, "seq_load_balancing_loss", self.tp_cp_group
        )
        return attached

    def count(self: Any, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count the tokens of each expert for its bias."""
        # `[tokens]` beside `[tokens, experts]`.
        assert plain_bias is not None
        plain_bias(self, routing_map if padding_mask is None else routing_map & ~padding_mask.unsqueeze(-1))

    def routing(self: Any, logits: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """Route ``[s, b, experts]``; losses weigh by samples where micro-batches differ in them."""
        samples[0] = logits.shape[1]
        probs, routing_map = plain_routing(self, logits, *rest, **named)
        mask = rest[0] if rest else named.get("padding_mask")
        may_choose_fewer(mask is not None)
        if mask is None:
            return probs, routing_map
        tokens = ~mask.reshape(-1, 1)
        return probs * tokens, routing_map & tokens

    attach.weight = weight  # type: ignore[attr-defined]
    changed: dict[str, Any] = {
        # The weight is that of `weight` alone.
        "calculate_per_token_loss": False,
        _ATTACH: MethodType(attach, router),
        "apply_z_loss": MethodType(apply_z_loss, router),
        "routing": MethodType(routing, router),
    }
    if plain_bias is not None:
        changed["_apply_seq_aux_loss"] = MethodType(balance_sequences, router)
        changed["_apply_expert_bias"] = MethodType(count, router)
    for name, value in changed.items():
        session.instances.set(_OWNER, router, name, value)


def _mean_square(logits: Tensor, tokens: Tensor, group: Any) -> Tensor:
    """Return this rank's share of the mean of squared ``logsumexp`` over the tokens of all ranks of a group.

    Args:
        logits: ``[n, experts]`` of this rank.
        tokens: bool ``[n]``, False where a position is no token.
        group: the ranks that share the sequences.
    """
    total = tokens.sum()
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    squares = torch.logsumexp(logits, dim=-1).square() * tokens
    return squares.sum() / total.clamp(min=1)


def _balance_of_sequences(scores: Tensor, routing_map: Tensor, router: TopKRouter) -> Tensor:
    """Return this rank's share of the mean over sequences of each one's balance, without coefficient.

    Args:
        scores: ``[s, b, experts]`` of this rank, zero where a position is no token.
        routing_map: bool ``[s, b, experts]``, likewise.
        router: says over how many ranks sequences are split, and how many experts a token has.
    """
    chosen = routing_map.sum(dim=0)
    if router.tp_cp_group.size() > 1:
        dist.all_reduce(chosen, group=router.tp_cp_group)
    lengths = chosen.sum(dim=-1) / router.topk
    sums = (scores.sum(dim=0) * chosen).sum(dim=-1)
    of_each = sums * scores.shape[-1] / (router.topk * lengths.square().clamp(min=1))
    return of_each.mean()
