"""A layer of experts and its losses, written down in plain torch, whole and in one process.

It is what every dispatcher, router and layout is compared with, and says nothing about how any of them works:
each token passes every expert, and a weight of zero leaves a result out. Nothing here calls megatron-core.

Shapes: ``T`` tokens of a micro-batch, sequence by sequence or not; ``E`` experts; ``k`` choices of a token;
``h`` and ``f`` widths; ``s`` positions; ``b`` samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

POLICIES = ("probs", "position")


@dataclass(frozen=True)
class Routes:
    """The routes of a micro-batch.

    Attributes:
        scores: ``[T, E]``, what losses of balance see: over all experts, the sum of a token's is 1.
        chosen: bool ``[T, E]``, the choices of each token before any is dropped.
        kept: bool ``[T, E]``, the choices that experts have room for.
        weights: ``[T, E]``, by which results of experts are multiplied; 0 for all others.
    """

    scores: Tensor
    chosen: Tensor
    kept: Tensor
    weights: Tensor


def routes(
    logits: Tensor,
    topk: int,
    *,
    score_function: str = "softmax",
    pre_softmax: bool = False,
    scaling_factor: float = 1.0,
    expert_bias: Tensor | None = None,
    capacity_factor: float | None = None,
    policy: str = "probs",
) -> Routes:
    """Return the routes of logits ``[T, E]``, as ``--moe-router-...`` say.

    Args:
        logits: of the router.
        topk: ``--moe-router-topk``.
        score_function: ``softmax`` or ``sigmoid``.
        pre_softmax: the softmax runs over all experts instead of over the chosen ones.
        scaling_factor: of the weights.
        expert_bias: ``[E]``, added to scores of ``sigmoid`` where experts are chosen, and nowhere else.
        capacity_factor: see `capacity`; None drops nothing.
        policy: see `kept_choices`.

    Raises:
        ValueError: an unknown score function or policy.
    """
    if score_function == "softmax":
        scores = torch.softmax(logits, dim=-1)
        ranked = logits
    elif score_function == "sigmoid":
        single = torch.sigmoid(logits)
        scores = single / single.sum(dim=-1, keepdim=True)
        ranked = single if expert_bias is None else single + expert_bias
    else:
        raise ValueError(f"score_function {score_function!r} is none of softmax, sigmoid")
    best = ranked.topk(topk, dim=-1).indices
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, best, True)
    if score_function == "sigmoid":
        weights = single * chosen
        if topk > 1:
            weights = weights / weights.sum(dim=-1, keepdim=True)
    elif pre_softmax:
        weights = scores * chosen
    else:
        weights = torch.softmax(logits.masked_fill(~chosen, -math.inf), dim=-1)
    weights = weights * scaling_factor
    kept = chosen
    if capacity_factor is not None:
        places = capacity(len(logits), logits.shape[1], topk, capacity_factor)
        kept = kept_choices(weights, chosen, places, policy)
    return Routes(scores, chosen, kept, weights * kept)


def capacity(tokens: int, experts: int, topk: int, factor: float) -> int:
    """Return how many tokens an expert takes: ``factor`` times an even share, rounded up."""
    return math.ceil(tokens * topk / experts * factor)


def kept_choices(weights: Tensor, chosen: Tensor, places: int, policy: str) -> Tensor:
    """Return bool ``[T, E]``, the choices that each expert keeps where it has room for some.

    Args:
        weights: ``[T, E]``.
        chosen: bool ``[T, E]``.
        places: of each expert.
        policy: ``probs`` keeps the largest weights, ``position`` the first tokens of the micro-batch.

    Raises:
        ValueError: an unknown policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy {policy!r} is none of {', '.join(POLICIES)}")
    kept = torch.zeros_like(chosen)
    for expert in range(chosen.shape[1]):
        tokens = chosen[:, expert].nonzero().flatten().tolist()
        if policy == "probs":
            tokens.sort(key=lambda token: float(weights[token, expert]), reverse=True)
        kept[tokens[:places], expert] = True
    return kept


def experts_output(hidden: Tensor, weights: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    """Return ``[T, h]``, the weighted sum of gated experts (SwiGLU).

    Args:
        hidden: ``[T, h]``.
        weights: ``[T, E]``, of `Routes`.
        fc1: ``[E, 2 f, h]``, the gate before the values.
        fc2: ``[E, h, f]``.
    """
    total = torch.zeros_like(hidden)
    for expert in range(len(fc1)):
        gate, value = (hidden @ fc1[expert].T).chunk(2, dim=-1)
        result = (torch.nn.functional.silu(gate) * value) @ fc2[expert].T
        total = total + weights[:, expert, None] * result
    return total


def balance_loss(scores: Tensor, counts: Tensor, topk: int, tokens: float | None = None) -> Tensor:
    """Return ``E / (k T_n T) Σ_e n_e Σ_t s_te``, which is 1 where everything is even.

    Args:
        scores: ``[T, E]`` of the tokens whose scores learn.
        counts: ``n_e``, ``[E]``, choices of each expert among ``tokens`` tokens; no gradient.
        topk: choices of a token.
        tokens: ``T_n``; by default those of ``scores``.
    """
    number = len(scores)
    over = number if tokens is None else tokens
    return scores.shape[1] / (topk * over * number) * (counts * scores.sum(dim=0)).sum()


def sequence_balance_loss(scores: Tensor, chosen: Tensor, topk: int) -> Tensor:
    """Return the mean over sequences of their own `balance_loss`.

    Args:
        scores: ``[s, b, E]``.
        chosen: bool ``[s, b, E]``.
        topk: choices of a token.
    """
    losses = [
        balance_loss(scores[:, sample], chosen[:, sample].sum(dim=0), topk)
        for sample in range(scores.shape[1])
    ]
    return torch.stack(losses).mean()


def z_loss(logits: Tensor) -> Tensor:
    """Return the mean over tokens of the squared logarithm of ``Σ_e exp(logits)``; of logits ``[T, E]``."""
    return torch.logsumexp(logits, dim=-1).square().mean()


def device_balance_loss(scores: Tensor, chosen: Tensor, topk: int, devices: int) -> Tensor:
    """Return ``D Σ_d n_d / (k T) P_d`` (DeepSeek-V2): choices of devices, and mean scores of their experts.

    Args:
        scores: ``[T, E]``.
        chosen: bool ``[T, E]``.
        topk: choices of a token.
        devices: ``D``; each has the next ``E / D`` experts.
    """
    chosen_of = chosen.unflatten(1, (devices, -1)).sum(dim=(0, 2)) / (topk * len(scores))
    mean_of = scores.unflatten(1, (devices, -1)).sum(dim=(0, 2)) / len(scores)
    return devices * (chosen_of * mean_of).sum()


def communication_balance_loss(scores: Tensor, chosen: Tensor, reached: int, devices: int) -> Tensor:
    """Return ``D Σ_d m_d / (M T) P_d`` (DeepSeek-V2): tokens that go to devices, and their mean scores.

    Args:
        scores: ``[T, E]``.
        chosen: bool ``[T, E]``.
        reached: ``M``, to how many devices a token may go.
        devices: ``D``.
    """
    sent_to = chosen.unflatten(1, (devices, -1)).any(dim=2).sum(dim=0) / (reached * len(scores))
    mean_of = scores.unflatten(1, (devices, -1)).sum(dim=(0, 2)) / len(scores)
    return devices * (sent_to * mean_of).sum()
