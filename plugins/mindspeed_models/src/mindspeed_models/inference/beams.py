"""Beam search and beam sampling of one request, as transformers computes them.

Running beams and finished hypotheses are kept apart. The score of a finished one is its sum of
log-probabilities divided by ``length ** length_penalty``, where the length counts the tokens of the answer
with the end token; the search ends when no running beam can become better than the worst of ``num_beams``
finished ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mindspeed_models.inference.cache import Cache, check_memory
from mindspeed_models.inference.decoding import Row, prefill, step
from mindspeed_models.inference.processors import drawn_without_return, process
from mindspeed_models.inference.requests import Generated

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mindspeed_models.inference.passes import Passes

_NEVER = -1.0e9


@dataclass
class _Search:
    """The state of one search; each rank of the model has the same.

    Attributes:
        running: tokens of each running beam's answer.
        scores: their sums of log-probabilities, ``[beams]`` float32.
        finished: tokens of the best hypotheses.
        finished_scores: of these, ``[beams]``; of places without one a very low number.
        is_finished: which places have one, ``[beams]`` bool.
        improvable: a running beam may still become better.
    """

    running: list[list[int]]
    scores: Tensor
    finished: list[list[int]]
    finished_scores: Tensor
    is_finished: Tensor
    improvable: bool = True

    @classmethod
    def of(cls, beams: int) -> _Search:
        """Return the search before the first step, in which all beams are alike and one counts."""
        scores = torch.full((beams,), _NEVER)
        scores[0] = 0.0
        return cls(
            [[] for _ in range(beams)],
            scores,
            [[] for _ in range(beams)],
            torch.full((beams,), _NEVER),
            torch.zeros(beams, dtype=torch.bool),
        )


def search(
    passes: Passes, row: Row, *, chunk: int, detokenize: Callable[[Sequence[int]], str]
) -> list[Generated]:
    """Continue one request by beams; return its best hypotheses, the best first. Collective.

    Raises:
        UserError: the cache does not fit.
    """
    settings = row.request.settings
    beams, prompt = settings.num_beams, row.request.prompt
    capacity = len(prompt) + row.limit
    check_memory(passes, beams, capacity)
    cache = Cache([0], capacity, passes.device, masks=passes.takes_masks)
    logits = prefill(passes, cache, [prompt], chunk)
    # Every beam begins with the same prompt, which is computed once.
    cache.keep([0] * beams)
    state = _Search.of(beams)
    while True:
        scores, places = _candidates(passes, logits, row, state)
        sources, done = _advance(state, scores, places, row, passes.vocab_size)
        if done:
            break
        cache.keep(sources)
        last = torch.tensor([tokens[-1] for tokens in state.running], device=passes.device)
        logits = step(passes, cache, last[:, None])
    return [_result(state, index, row, detokenize) for index in range(settings.num_return_sequences)]


def _candidates(passes: Passes, logits: Tensor | None, row: Row, state: _Search) -> tuple[Tensor, list[int]]:
    """Return the best continuations of all beams: scores ``[c]`` and places, beam · v + token."""
    settings = row.request.settings
    count = max(2, 1 + len(row.ends)) * settings.num_beams
    values = torch.zeros(2, count, dtype=torch.float64, device=passes.device)
    if passes.decides:
        assert logits is not None
        every = []
        # Beams of the first step are one row.
        rows = logits.expand(settings.num_beams, -1)
        for tokens, normal, sum_ in zip(state.running, rows.log_softmax(-1), state.scores.tolist()):
            scores = process(
                normal,
                [*row.request.prompt, *tokens],
                settings,
                generated=len(tokens),
                ends=row.ends,
                least=len(row.ends) + 1,
            )
            every.append(scores + sum_)
        joined = torch.cat(every)
        if settings.draws:
            seed = (row.request.request_id, len(state.running[0]))
            places = drawn_without_return(joined, count, settings, seed)
            best = joined[places]
        else:
            best, places = torch.topk(joined, count)
        # Scores are float32 and places below 2 ** 53: both are exact in float64.
        values.copy_(torch.stack([best.double(), places.double()]))
    agreed = passes.agree(values).cpu()
    return agreed[0].float(), [int(place) for place in agreed[1].tolist()]


def _advance(
    state: _Search, scores: Tensor, places: list[int], row: Row, vocabulary: int
) -> tuple[list[int], bool]:
    """Choose the beams that go on and the hypotheses that stay; return the beams' sources, and the end."""
    settings = row.request.settings
    beams = settings.num_beams
    sources = [place // vocabulary for place in places]
    grown = [[*state.running[source], place % vocabulary] for source, place in zip(sources, places)]
    length = len(grown[0])
    ends = torch.tensor([tokens[-1] in row.ends or length >= row.limit for tokens in grown])
    going_on = scores + ends.float() * _NEVER
    kept = torch.topk(going_on, beams)[1].tolist()
    _finish(state, grown, scores, ends, length, settings.length_penalty)
    state.running = [grown[index] for index in kept]
    state.scores = going_on[kept]
    best = float(state.scores[0]) / length**settings.length_penalty
    worst = torch.where(state.is_finished, state.finished_scores.min(), torch.tensor(_NEVER))
    state.improvable = state.improvable and bool((best > worst).any())
    done = not state.improvable or bool(ends.all())
    return [sources[index] for index in kept], done


def _finish(
    state: _Search, grown: list[list[int]], scores: Tensor, ends: Tensor, length: int, penalty: float
) -> None:
    """Let candidates that ended take the places of worse hypotheses; the first ``beams`` of them may."""
    beams = len(state.finished)
    among_first = torch.arange(len(grown)) < beams
    just = ends & among_first
    ranked = scores / length**penalty
    if not state.improvable:
        ranked = ranked + _NEVER
    ranked = ranked + (~just).float() * _NEVER
    merged = torch.cat([state.finished_scores, ranked])
    flags = torch.cat([state.is_finished, just])
    texts = [*state.finished, *grown]
    best, index = torch.topk(merged, beams)
    state.finished = [texts[place] for place in index.tolist()]
    state.finished_scores, state.is_finished = best, flags[index]


def _result(state: _Search, index: int, row: Row, detokenize: Callable[[Sequence[int]], str]) -> Generated:
    from mindspeed_models.inference.decoding import text_of

    tokens = list(state.finished[index])
    ended = bool(tokens) and tokens[-1] in row.ends
    if ended:
        tokens.pop()
    text = text_of(detokenize, row.request)
    text.grow(tokens, ended=True)
    return Generated(
        tokens=tokens,
        text=text.text,
        finish_reason="stop" if ended or text.stopped else "length",
        logprobs=None,
        prompt_tokens=len(row.request.prompt),
        score=float(state.finished_scores[index]),
    )
