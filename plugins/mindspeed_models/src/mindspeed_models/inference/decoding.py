"""Greedy decoding and sampling of a batch: prefill, then a token of every row in each step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mindspeed_models.inference.cache import Cache, check_memory
from mindspeed_models.inference.processors import choose, process
from mindspeed_models.inference.requests import FinishReason, Generated, GenerationRequest
from mindspeed_models.inference.text_stream import TextStream

if TYPE_CHECKING:
    from mindspeed_models.inference.passes import Passes

Events = list[tuple[int, str]]
"""Requests and their new text."""
Decoding = Generator[Events, "set[int] | None", None]
"""Yields the new texts of a step and is sent the requests that are cancelled."""


@dataclass
class Row:
    """One request in a batch.

    Attributes:
        place: of the request among those of the call.
        request: the request.
        ends: tokens that end the answer.
        limit: tokens of the answer at most.
        text: of the answer.
        tokens: of the answer.
        logprobs: of the tokens, where they are asked for.
        top: likeliest tokens in the place of each.
        reason: why the answer has ended; None while it has not.
    """

    place: int
    request: GenerationRequest
    ends: frozenset[int]
    limit: int
    text: TextStream
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    reason: FinishReason | None = None

    def take(self, token: int, *, follow_text: bool) -> str:
        """Take the next token; return the text that is new, where texts are followed."""
        if token in self.ends:
            self.reason = "stop"
        else:
            self.tokens.append(token)
        if self.reason is None and len(self.tokens) >= self.limit:
            self.reason = "length"
        new = ""
        if follow_text or self.request.settings.stop:
            new = self.text.grow(self.tokens, ended=self.reason is not None)
            if self.text.stopped:
                self.reason = "stop"
        return new

    def result(self) -> Generated:
        """Return the answer."""
        asked = self.request.settings.logprobs
        self.text.grow(self.tokens, ended=True)
        kept = len(self.tokens)
        return Generated(
            tokens=self.tokens,
            text=self.text.text,
            finish_reason=self.reason or "stop",
            logprobs=None if asked is None else self.logprobs[:kept],
            prompt_tokens=len(self.request.prompt),
            top_logprobs=self.top[:kept] if asked else None,
        )


def decode(passes: Passes, rows: Sequence[Row], *, chunk: int, follow_text: bool) -> Decoding:
    """Continue the requests of a batch until all have ended. Collective over the ranks of the model.

    Args:
        passes: the model.
        rows: the requests; they receive tokens and texts.
        chunk: tokens of the prompts that are computed at once; 0 for all.
        follow_text: yield new text in each step, and take cancellations.

    Raises:
        UserError: the cache does not fit.
    """
    running = list(rows)
    longest = max(len(row.request.prompt) for row in running)
    # The last token of an answer is never computed further.
    capacity = max(longest + row.limit for row in running)
    check_memory(passes, len(running), capacity)
    padding = [longest - len(row.request.prompt) for row in running]
    cache = Cache(padding, capacity, passes.device, masks=passes.takes_masks)
    logits = prefill(passes, cache, [row.request.prompt for row in running], chunk)
    while True:
        tokens = _next_tokens(passes, logits, running)
        events: Events = []
        for row, token in zip(running, tokens):
            if row.reason is None and (new := row.take(token, follow_text=follow_text)):
                events.append((row.request.request_id, new))
        if follow_text:
            cancelled = (yield events) or set()
            for row in running:
                if row.reason is None and row.request.request_id in cancelled:
                    row.reason = "stop"
        live = [index for index, row in enumerate(running) if row.reason is None]
        if not live:
            return
        if len(live) <= len(running) // 2:
            # Rows that have ended cost as much as others; half of them are worth a copy of the cache.
            cache.keep(live)
            running = [running[index] for index in live]
        last = [row.tokens[-1] if row.tokens else 0 for row in running]
        logits = step(passes, cache, torch.tensor(last, device=passes.device)[:, None])


def prefill(passes: Passes, cache: Cache, prompts: Sequence[Sequence[int]], chunk: int) -> Tensor | None:
    """Compute prompts, in chunks; return the logits ``[b, v]`` behind them on the last stage."""
    longest = max(map(len, prompts))
    padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    ids = torch.tensor(padded, device=passes.device)
    logits = None
    for part in ids.split(chunk or longest, dim=1):
        logits = step(passes, cache, part)
    cache.context.enable_decode_mode()
    return logits


def step(passes: Passes, cache: Cache, ids: Tensor) -> Tensor | None:
    """Compute the next tokens ``[b, s]`` of every row; return the last one's logits ``[b, v]``."""
    count = ids.shape[1]
    with torch.no_grad():
        found = passes.forward(ids, cache.positions(count), cache.mask(count), cache.context)
    cache.advance(count)
    return None if found is None else found[:, -1]


def _next_tokens(passes: Passes, logits: Tensor | None, rows: Sequence[Row]) -> list[int]:
    """Choose the next token of each row where logits are; return the same everywhere."""
    tokens = torch.zeros(len(rows), dtype=torch.int64, device=passes.device)
    if passes.decides:
        assert logits is not None
        tokens.copy_(torch.tensor(_chosen(logits, rows)))
    chosen: list[int] = passes.agree(tokens).tolist()
    asked = [row.request.settings.logprobs for row in rows if row.reason is None]
    counts = [count for count in asked if count is not None]
    if counts:
        _add_logprobs(passes, logits, rows, chosen, max(counts))
    return chosen


def _chosen(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    likeliest: list[int] | None = None
    found = []
    for index, row in enumerate(rows):
        settings = row.request.settings
        plain = settings.repetition_penalty == 1.0 and len(row.tokens) >= settings.min_new_tokens
        if row.reason is not None:
            found.append(0)
        elif plain and not settings.draws:
            if likeliest is None:
                likeliest = logits.argmax(-1).tolist()
            found.append(likeliest[index])
        else:
            tokens = [*row.request.prompt, *row.tokens]
            scores = process(logits[index], tokens, settings, generated=len(row.tokens), ends=row.ends)
            found.append(choose(scores, settings, row.request.request_id, len(row.tokens)))
    return found


def _add_logprobs(
    passes: Passes, logits: Tensor | None, rows: Sequence[Row], chosen: Sequence[int], most: int
) -> None:
    """Give rows the log-probabilities of their tokens, and of the likeliest ones, before any processing."""
    values = torch.zeros(len(rows), 1 + 2 * most, dtype=torch.float32, device=passes.device)
    if passes.decides:
        assert logits is not None
        normal = logits.log_softmax(-1)
        values[:, 0] = normal.gather(1, torch.tensor(chosen, device=normal.device)[:, None])[:, 0]
        if most:
            top, index = normal.topk(most, dim=-1)
            values[:, 1 : 1 + most] = top
            # Exact below 2 ** 24, which no vocabulary reaches.
            values[:, 1 + most :] = index.float()
    for row, token, given in zip(rows, chosen, passes.agree(values).tolist()):
        count = row.request.settings.logprobs
        if row.reason is not None or count is None or token in row.ends:
            continue
        row.logprobs.append(given[0])
        row.top.append({int(index): value for value, index in zip(given[1 : 1 + count], given[1 + most :])})


def text_of(detokenize: Callable[[Sequence[int]], str], request: GenerationRequest) -> TextStream:
    """Return the empty text of a request's answer."""
    return TextStream(detokenize, request.settings.stop)
