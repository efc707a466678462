"""The losses of a training step of a small language model, in plain torch and one process: a definition.

A GPT without positions: RMSNorm, causal attention with or without a learnable offset of the softmax, gated
MLPs or experts, untied output, predictions of further tokens. Its parameters are those of the canonical
state that proofs start from (`mindspeed_testing.canonical`), so that any layout can be compared with
it: losses, and with autograd gradients. Nothing here calls megatron-core.

Shapes: ``[b, s]`` tokens, labels and masks of a micro-batch; hidden states ``[b, s, h]``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, silu

from mindspeed_testing.dense_experts import (
    Routes,
    balance_loss,
    communication_balance_loss,
    device_balance_loss,
    experts_output,
    routes,
    sequence_balance_loss,
    z_loss,
)

BALANCE_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


@dataclass(frozen=True)
class DenseOptions:
    """The model and its losses.

    Attributes:
        layers: ``--num-layers``.
        heads: ``--num-attention-heads``; every head has keys of its own.
        predictions: ``--mtp-num-layers``.
        prediction_weight: ``--mtp-loss-scaling-factor``, shared by all of them.
        per_token: ``--calculate-per-token-loss``.
        topk: ``--moe-router-topk``.
        balance: coefficients by type of ``--moe-router-load-balancing-type``.
        z: ``--moe-z-loss-coeff``.
        devices: that hold experts.
        device: ``--moe-device-level-aux-loss-coeff``.
        communication: ``--moe-comm-aux-loss-coeff``.
        routing: options of `mindspeed_testing.dense_experts.routes`.
    """

    layers: int = 2
    heads: int = 4
    predictions: int = 0
    prediction_weight: float = 0.1
    per_token: bool = False
    topk: int = 2
    balance: Mapping[str, float] = field(default_factory=dict)
    z: float = 0.0
    devices: int = 1
    device: float = 0.0
    communication: float = 0.0
    routing: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class DenseBatch:
    """A micro-batch of all data-parallel ranks.

    Attributes:
        tokens: int64 ``[d, b, s]`` for ``d`` ranks.
        labels: int64 ``[d, b, s]``.
        mask: float ``[d, b, s]``.
    """

    tokens: Tensor
    labels: Tensor
    mask: Tensor


@dataclass(frozen=True)
class DenseStep:
    """The losses of a step.

    Attributes:
        total: what is trained.
        reported: each loss by the name under which it is logged, without its coefficient.
    """

    total: Tensor
    reported: Mapping[str, Tensor]


def dense_step(
    parameters: Mapping[str, Tensor], batches: Sequence[DenseBatch], options: DenseOptions
) -> DenseStep:
    """Return the losses of a step, with gradients of all parameters.

    The definitions: the model's loss and those of predictions are means over the tokens that count, of the
    step with ``per_token``, otherwise of each micro-batch and then over micro-batches and ranks; what is
    reported of them is the mean over the tokens of the step in both cases. Losses of experts are means over
    micro-batches and ranks in both cases, summed over layers in what is trained and averaged over them in
    what is reported. ``global_aux_loss`` counts the choices of all ranks in the micro-batches of the step
    so far.

    Args:
        parameters: by canonical name.
        batches: in order.
        options: the model and its losses.
    """
    layers = _Layers(parameters, options)
    sums: dict[str, list[Tensor]] = {}
    counts: dict[str, list[Tensor]] = {}
    for batch in batches:
        layers.new_micro_batch()
        for tokens, labels, mask in zip(batch.tokens, batch.labels, batch.mask):
            for name, (total, count) in layers.token_losses(tokens, labels, mask).items():
                sums.setdefault(name, []).append(total)
                counts.setdefault(name, []).append(count)
        layers.end_micro_batch()
    reported = {name: _mean(sums[name], counts[name], per_token=True) for name in sums}
    trained = {name: _mean(sums[name], counts[name], per_token=options.per_token) for name in sums}
    total = trained["lm loss"]
    for ahead in range(options.predictions):
        weight = options.prediction_weight / options.predictions
        total = total + weight * trained[f"mtp_{ahead + 1} loss"]
    for name, (coefficient, by_layer) in layers.losses_of_experts().items():
        total = total + coefficient * by_layer.sum()
        reported[name] = by_layer.mean()
    return DenseStep(total, reported)


def _mean(sums: list[Tensor], counts: list[Tensor], *, per_token: bool) -> Tensor:
    total, count = torch.stack(sums), torch.stack(counts)
    if per_token:
        return total.sum() / count.sum().clamp(min=1)
    return (total / count.clamp(min=1)).mean()


class _Layers:
    """Passes of the model, and what routers chose in them."""

    def __init__(self, parameters: Mapping[str, Tensor], options: DenseOptions) -> None:
        self.parameters, self.options = parameters, options
        self._passes: dict[str, list[tuple[Tensor, Routes]]] = {}
        self._so_far: dict[str, Tensor] = {}
        self._tokens = 0
        self._steps = 0
        self._losses: dict[str, dict[str, list[Tensor]]] = {}

    def token_losses(self, tokens: Tensor, labels: Tensor, mask: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return sum and count of the loss of one rank's micro-batch, and of each prediction."""
        hidden = self._embedded(tokens)
        for layer in range(self.options.layers):
            hidden = self._layer(f"decoder.layers.{layer}.", hidden)
        hidden = self._norm("decoder.final_layernorm.weight", hidden)
        found = {"lm loss": self._loss(hidden, labels, mask)}
        for ahead in range(self.options.predictions):
            tokens, labels, mask = (_next(value) for value in (tokens, labels, mask))
            hidden = self._prediction(f"mtp.layers.{ahead}.", hidden, tokens)
            found[f"mtp_{ahead + 1} loss"] = self._loss(hidden, labels, mask)
        return found

    def _prediction(self, prefix: str, hidden: Tensor, tokens: Tensor) -> Tensor:
        both = torch.cat(
            (
                self._norm(f"{prefix}enorm.weight", self._embedded(tokens)),
                self._norm(f"{prefix}hnorm.weight", hidden),
            ),
            dim=-1,
        )
        hidden = self._layer(
            f"{prefix}transformer_layer.", both @ self.parameters[f"{prefix}eh_proj.weight"].T
        )
        return self._norm(f"{prefix}final_layernorm.weight", hidden)

    def _embedded(self, tokens: Tensor) -> Tensor:
        return self.parameters["embedding.word_embeddings.weight"][tokens]

    def _loss(self, hidden: Tensor, labels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        logits = hidden @ self.parameters["output_layer.weight"].T
        losses = cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
        return (losses * mask.flatten()).sum(), mask.sum()

    def _norm(self, name: str, hidden: Tensor) -> Tensor:
        scale = hidden.square().mean(dim=-1, keepdim=True).add(1e-5).rsqrt()
        return hidden * scale * self.parameters[name]

    def _layer(self, prefix: str, hidden: Tensor) -> Tensor:
        attention, mlp = f"{prefix}self_attention.", f"{prefix}mlp."
        normed = self._norm(f"{attention}linear_qkv.layer_norm_weight", hidden)
        hidden = hidden + self._attention(attention, normed)
        normed = self._norm(f"{mlp}linear_fc1.layer_norm_weight", hidden)
        return hidden + self._mlp(mlp, normed)

    def _attention(self, prefix: str, hidden: Tensor) -> Tensor:
        given, heads = self.parameters, self.options.heads
        of_heads = (hidden @ given[f"{prefix}linear_qkv.weight"].T).unflatten(-1, (heads, 3, -1))
        query, key, value = of_heads.permute(3, 0, 2, 1, 4)
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -math.inf)
        sink = given.get(f"{prefix}core_attention.softmax_offset")
        if sink is not None:
            column = sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, column), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : value.shape[-2]]
        return (weights @ value).transpose(1, 2).flatten(2) @ given[f"{prefix}linear_proj.weight"].T

    def _mlp(self, prefix: str, hidden: Tensor) -> Tensor:
        given, options = self.parameters, self.options
        router = given.get(f"{prefix}router.weight")
        if router is None:
            gate, value = (hidden @ given[f"{prefix}linear_fc1.weight"].T).chunk(2, dim=-1)
            return (silu(gate) * value) @ given[f"{prefix}linear_fc2.weight"].T
        # Positions come before samples, as a capacity counts them.
        rows = hidden.transpose(0, 1)
        logits = rows @ router.T
        found = routes(logits.flatten(0, 1), options.topk, **options.routing)  # type: ignore[arg-type]
        self._passes.setdefault(prefix, []).append((logits, found))
        experts = f"{prefix}experts.experts.linear_fc"
        output = experts_output(
            rows.flatten(0, 1), found.weights, given[f"{experts}1.weight"], given[f"{experts}2.weight"]
        )
        return output.view(rows.shape).transpose(0, 1)

    def new_micro_batch(self) -> None:
        """Forget the routes of the micro-batch before."""
        self._passes.clear()

    def end_micro_batch(self) -> None:
        """Compute the losses of experts of a micro-batch, on all ranks."""
        self._steps += 1
        for layer, passes in self._passes.items():
            chosen = sum(found.chosen.sum(dim=0) for _, found in passes)
            self._so_far[layer] = self._so_far.get(layer, 0) + chosen  # type: ignore[assignment]
            everywhere = sum(len(found.scores) for _, found in passes)
            average = self._so_far[layer] / self._steps
            for logits, found in passes:
                for name, (_, value) in self._of_one(logits, found, average, everywhere).items():
                    self._losses.setdefault(name, {}).setdefault(layer, []).append(value)

    def _of_one(
        self, logits: Tensor, found: Routes, average: Tensor, everywhere: int
    ) -> dict[str, tuple[float, Tensor]]:
        options, topk = self.options, self.options.topk
        scores, chosen = found.scores, found.chosen
        by_place = (logits.shape[0], logits.shape[1], -1)
        values = {
            "aux_loss": lambda: balance_loss(scores, chosen.sum(dim=0), topk),
            "seq_aux_loss": lambda: sequence_balance_loss(scores.view(by_place), chosen.view(by_place), topk),
            "global_aux_loss": lambda: balance_loss(scores, average, topk, everywhere),
        }
        losses = {BALANCE_NAMES[kind]: (share, values[kind]()) for kind, share in options.balance.items()}
        if options.z:
            losses["z_loss"] = options.z, z_loss(logits.flatten(0, 1))
        if options.device:
            losses["device"] = options.device, device_balance_loss(scores, found.kept, topk, options.devices)
        if options.communication:
            reached = min(topk, options.devices)
            value = communication_balance_loss(scores, found.kept, reached, options.devices)
            losses["communication"] = options.communication, value
        return losses

    def losses_of_experts(self) -> dict[str, tuple[float, Tensor]]:
        """Return coefficient and values ``[layers]`` of each loss of experts, by name."""
        options = self.options
        shares = {BALANCE_NAMES[kind]: share for kind, share in options.balance.items()}
        shares |= {"z_loss": options.z, "device": options.device, "communication": options.communication}
        return {
            name: (shares[name], torch.stack([torch.stack(values).mean() for values in of_layers.values()]))
            for name, of_layers in self._losses.items()
        }


def _next(values: Tensor) -> Tensor:
    """Return ``[b, s]`` moved by one position, 0 behind the last."""
    return torch.cat((values[:, 1:], torch.zeros_like(values[:, :1])), dim=1)
