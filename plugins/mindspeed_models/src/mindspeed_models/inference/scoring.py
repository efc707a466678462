"""Log-likelihoods of given continuations: one pass over whole texts, without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mindspeed_core.errors import UserError
from mindspeed_models.inference.requests import Scored

if TYPE_CHECKING:
    from mindspeed_models.inference.passes import Passes

_AT_ONCE = 1 << 26
"""Logits of a batch at most: 256 MiB in float32."""
_POSITIONS = 1 << 13
"""Positions of a batch at most."""

Pair = tuple[list[int], list[int]]


def check_pairs(pairs: Sequence[Pair], *, vocab_size: int, max_positions: int) -> None:
    """Check contexts and continuations.

    Raises:
        UserError: one is empty, too long, or has ids that the model lacks; says which.
    """
    for number, (context, continuation) in enumerate(pairs):
        where = f"score: pair {number}"
        if not context:
            raise UserError(f"{where} has no context; begin it with the token that begins texts")
        if not continuation:
            raise UserError(f"{where} has no continuation; leave the pair out")
        # The last token is scored and never read.
        length = len(context) + len(continuation) - 1
        if length > max_positions:
            raise UserError(
                f"{where} has {length + 1} tokens, the model {max_positions} positions; cut the context's "
                "beginning"
            )
        wrong = next((each for each in (*context, *continuation) if not 0 <= each < vocab_size), None)
        if wrong is not None:
            raise UserError(
                f"{where} has the id {wrong}, the model {vocab_size} tokens; use the model's own tokenizer"
            )


def batches(pairs: Sequence[Pair], vocab_size: int) -> list[list[int]]:
    """Return the places of pairs, in batches of like lengths whose logits have a bounded size."""
    longest_first = sorted(range(len(pairs)), key=lambda place: -_length(pairs[place]))
    limit = max(1, min(_POSITIONS, _AT_ONCE // vocab_size))
    found: list[list[int]] = []
    for place in longest_first:
        if found and (len(found[-1]) + 1) * _length(pairs[found[-1][0]]) <= limit:
            found[-1].append(place)
        else:
            found.append([place])
    return found


def score(passes: Passes, pairs: Sequence[Pair]) -> list[Scored]:
    """Score one batch. Collective over the ranks of the model.

    Texts of other lengths end with padding, which nothing before it sees.

    Args:
        passes: the model.
        pairs: contexts and continuations.
    """
    texts = [[*context, *continuation] for context, continuation in pairs]
    inputs = [text[:-1] for text in texts]
    longest = max(map(len, inputs))
    ids = _filled(inputs, longest, passes.device)
    targets = _filled([text[1:] for text in texts], longest, passes.device)
    positions = torch.arange(longest, device=passes.device).expand_as(ids)
    with torch.no_grad():
        logits = passes.forward(ids, positions, None)
    found = torch.zeros(2, *ids.shape, dtype=torch.float32, device=passes.device)
    if passes.decides:
        assert logits is not None
        for index, row in enumerate(logits):
            # Row by row: log-probabilities of all are as large as the logits.
            normal = row.log_softmax(-1)
            found[0, index] = normal.gather(1, targets[index][:, None])[:, 0]
            found[1, index] = (row.argmax(-1) == targets[index]).float()
    logprobs, greedy = passes.agree(found).tolist()
    results = []
    for index, (context, continuation) in enumerate(pairs):
        part = slice(len(context) - 1, len(context) - 1 + len(continuation))
        tokens = logprobs[index][part]
        results.append(Scored(sum(tokens), all(greedy[index][part]), tokens))
    return results


def _length(pair: Pair) -> int:
    return len(pair[0]) + len(pair[1]) - 1


def _filled(rows: Sequence[Sequence[int]], length: int, device: torch.device) -> Tensor:
    return torch.tensor([[*row, *[0] * (length - len(row))] for row in rows], device=device)
