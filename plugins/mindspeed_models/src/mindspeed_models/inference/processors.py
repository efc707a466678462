"""Changes of the scores of the next token, in transformers' order, and the draw from them.

Repetition penalty, least number of tokens, temperature, top-k, top-p: each computes what the class of
transformers of the same purpose does. The draw depends on a seed, the request and the step alone: not on the
layout, nor on what else is in the batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from mindspeed_models.inference.requests import GenerationSettings

HIDDEN = float("-inf")


def process(
    scores: Tensor,
    tokens: Sequence[int],
    settings: GenerationSettings,
    *,
    generated: int,
    ends: Collection[int],
    least: int = 1,
) -> Tensor:
    """Return the scores ``[v]`` that the next token is chosen by.

    Args:
        scores: float32 logits, or log-probabilities of beam search, ``[v]``; left as they are.
        tokens: prompt and answer so far.
        settings: of the request.
        generated: tokens of the answer so far.
        ends: tokens that end an answer.
        least: tokens that top-k and top-p leave at least.
    """
    if settings.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(tokens)), device=scores.device)
        found = scores[seen]
        punished = torch.where(
            found < 0, found * settings.repetition_penalty, found / settings.repetition_penalty
        )
        scores = scores.scatter(0, seen, punished)
    if generated < settings.min_new_tokens and ends:
        scores = scores.clone()
        scores[sorted(ends)] = HIDDEN
    if not settings.draws:
        return scores
    if settings.temperature != 1.0:
        scores = scores / settings.temperature
    if settings.top_k:
        count = min(max(settings.top_k, least), scores.numel())
        scores = scores.masked_fill(scores < torch.topk(scores, count)[0][-1], HIDDEN)
    if settings.top_p < 1.0:
        ordered, index = torch.sort(scores, descending=False)
        removed = ordered.softmax(-1).cumsum(-1) <= 1 - settings.top_p
        removed[-least:] = False
        scores = scores.masked_fill(torch.zeros_like(removed).scatter(0, index, removed), HIDDEN)
    return scores


def choose(scores: Tensor, settings: GenerationSettings, request_id: int, step: int) -> int:
    """Return the next token: the likeliest, or one that is drawn from processed scores ``[v]``."""
    if not settings.draws:
        return int(scores.argmax())
    return drawn(scores.softmax(-1), uniform(settings.seed, request_id, step))


def drawn(probabilities: Tensor, at: float) -> int:
    """Return the first id at which the sum of the probabilities ``[v]`` exceeds ``at`` of the whole."""
    summed = probabilities.double().cpu().cumsum(-1)
    return int(torch.searchsorted(summed, at * summed[-1], right=True).clamp_max(_last(probabilities)))


def drawn_without_return(
    scores: Tensor, count: int, settings: GenerationSettings, seed: tuple[int, int]
) -> Tensor:
    """Draw different places of scores ``[n]`` by their softmax, one after the other, for beams that sample.

    Args:
        scores: accumulated log-probabilities.
        count: places to draw.
        settings: has the seed.
        seed: request and step.
    """
    left = scores.softmax(-1).double().cpu()
    found: list[int] = []
    for number in range(count):
        summed = left.cumsum(-1)
        if summed[-1] <= 0:
            # Fewer than so many are possible: the likeliest of all others follow.
            others = scores.cpu().clone()
            others[found] = HIDDEN
            found += torch.topk(others, count - number)[1].tolist()
            break
        at = uniform(settings.seed, seed[0], seed[1], number)
        place = int(torch.searchsorted(summed, at * summed[-1], right=True).clamp_max(_last(left)))
        found.append(place)
        left[place] = 0.0
    return torch.tensor(found, device=scores.device)


def uniform(*numbers: int) -> float:
    """Return a number in ``[0, 1)`` that depends on whole numbers alone."""
    digest = hashlib.sha256(" ".join(map(str, numbers)).encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / (1 << 53)


def _last(probabilities: Tensor) -> int:
    """Return the last place with a probability above 0."""
    return int(probabilities.nonzero()[-1])
