"""Requests to a model and its answers, without torch.

The values that `LoadedModel` takes and gives: settings of one generation, a request, its result and the
score of a given continuation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mindspeed_core.errors import ArgumentError

MAX_NEW_TOKENS = "--max-new-tokens"
MAX_SEED = 2**63 - 1
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of one generation; defaults are those of the seed's ``generate``.

    Attributes:
        do_sample: draw tokens; False takes the likeliest.
        top_k: draw from the likeliest ``top_k`` tokens; 0 from all.
        top_p: draw from the fewest likeliest tokens whose probabilities sum to at least ``top_p``.
        temperature: the logits are divided by it; 0 takes the likeliest token.
        num_beams: running hypotheses of beam search; 1 searches without beams.
        max_new_tokens: tokens to generate at most; 0 leaves it to ``max_length``.
        max_length: tokens of prompt and answer together, where ``max_new_tokens`` is 0.
        min_new_tokens: no end token is drawn before so many tokens.
        eos_token_ids: tokens that end an answer; None for the model's own.
        pad_token_id: fills rows of ids that end before others; None for the first end token.
        bos_token_id: put before a prompt that does not begin with it; None for none.
        stop: texts that end an answer; they are not part of it.
        seed: of the drawing; the tokens depend on it, the request's id and its text, on nothing else.
        repetition_penalty: logits of tokens seen are divided by it if positive, else multiplied.
        length_penalty: exponent of a hypothesis' length in its score.
        num_return_sequences: hypotheses of beam search to return.
        logprobs: log-probabilities of the tokens chosen are returned; a number above 0 also asks for those
            of so many likeliest tokens. None for none.
    """

    do_sample: bool = False
    top_k: int = 50
    top_p: float = 1.0
    temperature: float = 1.0
    num_beams: int = 1
    max_new_tokens: int = 0
    max_length: int = 128
    min_new_tokens: int = 0
    eos_token_ids: tuple[int, ...] | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    stop: tuple[str, ...] = ()
    seed: int = 0
    repetition_penalty: float = 1.0
    length_penalty: float = 1.0
    num_return_sequences: int = 1
    logprobs: int | None = None

    @property
    def draws(self) -> bool:
        """Return whether tokens are drawn: at temperature 0 the likeliest is taken."""
        return self.do_sample and self.temperature > 0

    def new_tokens(self, prompt_tokens: int) -> int:
        """Return how many tokens a prompt of ``prompt_tokens`` may be continued by."""
        return self.max_new_tokens or max(0, self.max_length - prompt_tokens)

    def validate(
        self, *, vocab_size: int | None = None, max_positions: int | None = None, stream: bool = False
    ) -> None:
        """Check every value by itself, and with the model's sizes where they are given.

        Args:
            vocab_size: tokens that the model has.
            max_positions: positions that it has.
            stream: the text is shown while it grows.

        Raises:
            ArgumentError: one sentence with the flag, its value and the way out.
        """
        self._check_lengths(max_positions)
        self._check_drawing(vocab_size)
        self._check_beams(stream, vocab_size)
        for flag, ids in (
            ("--eos-token-id", self.eos_token_ids or ()),
            ("--pad-token-id", _given(self.pad_token_id)),
            ("--bos-token-id", _given(self.bos_token_id)),
        ):
            for index in ids:
                if not _whole(index) or index < 0 or (vocab_size is not None and index >= vocab_size):
                    last = "" if vocab_size is None else f" up to {vocab_size - 1}"
                    raise ArgumentError(flag, index, "is no token of the model", f"use an id from 0{last}")

    def _check_lengths(self, max_positions: int | None) -> None:
        for flag, value, least in (
            (MAX_NEW_TOKENS, self.max_new_tokens, 0),
            ("--max-length", self.max_length, 1),
            ("--min-new-tokens", self.min_new_tokens, 0),
        ):
            if not _whole(value) or value < least:
                raise ArgumentError(flag, value, "is no number of tokens", f"use a whole number from {least}")
        if max_positions is not None and self.max_new_tokens >= max_positions:
            raise ArgumentError(
                MAX_NEW_TOKENS,
                self.max_new_tokens,
                f"the model has {max_positions} positions, of which a prompt needs one",
                f"use at most {max_positions - 1}",
            )
        if self.max_new_tokens and self.min_new_tokens > self.max_new_tokens:
            raise ArgumentError(
                "--min-new-tokens",
                self.min_new_tokens,
                f"is more than {MAX_NEW_TOKENS} {self.max_new_tokens}",
                "lower it",
            )
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise ArgumentError("--stop", "", "an empty text ends every answer at once", "drop it")

    def _check_drawing(self, vocab_size: int | None) -> None:
        if not _finite(self.temperature) or self.temperature < 0:
            raise ArgumentError(
                "--temperature", self.temperature, "is no temperature", "use a number from 0, which is greedy"
            )
        if not _whole(self.top_k) or self.top_k < 0:
            raise ArgumentError(
                "--top-k", self.top_k, "is no number of tokens", "use 0 for all, or a number from 1"
            )
        if not _finite(self.top_p) or not 0 < self.top_p <= 1:
            raise ArgumentError(
                "--top-p", self.top_p, "is no probability", "use a number above 0 and at most 1"
            )
        if not _finite(self.repetition_penalty) or self.repetition_penalty <= 0:
            raise ArgumentError(
                "--repetition-penalty",
                self.repetition_penalty,
                "is no penalty",
                "use a number above 0; 1 changes nothing",
            )
        if not _whole(self.seed) or not 0 <= self.seed <= MAX_SEED:
            raise ArgumentError("--seed", self.seed, "is no seed", f"use a whole number from 0 to {MAX_SEED}")
        if self.logprobs is not None and (
            not _whole(self.logprobs) or not 0 <= self.logprobs <= (vocab_size or self.logprobs)
        ):
            raise ArgumentError(
                "--logprobs", self.logprobs, "is no number of tokens of the model", "use a number from 0"
            )

    def _check_beams(self, stream: bool, vocab_size: int | None) -> None:
        if not _whole(self.num_beams) or self.num_beams < 1:
            raise ArgumentError("--num-beams", self.num_beams, "is no number of beams", "use 1 or more")
        if vocab_size is not None and 2 * self.num_beams > vocab_size:
            raise ArgumentError(
                "--num-beams",
                self.num_beams,
                f"each step compares {2 * self.num_beams} candidates, the model has {vocab_size} tokens",
                f"use at most {vocab_size // 2}",
            )
        if not _finite(self.length_penalty):
            raise ArgumentError(
                "--length-penalty", self.length_penalty, "is no number", "use 1 for the mean log-probability"
            )
        if not _whole(self.num_return_sequences) or not 1 <= self.num_return_sequences <= self.num_beams:
            raise ArgumentError(
                "--num-return-sequences",
                self.num_return_sequences,
                f"beam search with --num-beams {self.num_beams} has as many hypotheses",
                f"use 1 to {self.num_beams}, or more beams",
            )
        if stream and self.num_beams > 1:
            raise ArgumentError(
                "--stream", None, "beam search knows its text at the end only", "use --num-beams 1"
            )
        if self.logprobs is not None and self.num_beams > 1:
            raise ArgumentError(
                "--logprobs",
                self.logprobs,
                "beam search compares whole hypotheses",
                "use --num-beams 1, or drop it",
            )


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to continue.

    Attributes:
        prompt: token ids; at least one.
        settings: how.
        request_id: what `generate_requests` calls the request by; part of the seed of its drawing.
        adapter: name of the adapter; None for the first, or for none where none is loaded.
    """

    prompt: list[int]
    settings: GenerationSettings
    request_id: int = 0
    adapter: str | None = None


@dataclass(frozen=True)
class Generated:
    """One continuation.

    Attributes:
        tokens: ids, without the prompt and without the end token.
        text: the continuation, up to a stop text.
        finish_reason: ``stop`` for an end token, a stop text or a request that was cancelled; ``length``
            where the limit came first.
        logprobs: natural log-probabilities of ``tokens`` as the model gives them, before any processing;
            None where they were not asked for.
        prompt_tokens: tokens of the prompt.
        top_logprobs: for each token the likeliest tokens with theirs, where so many were asked for.
        score: of beam search: sum of log-probabilities divided by the length to ``length_penalty``.
    """

    tokens: list[int]
    text: str
    finish_reason: FinishReason
    logprobs: list[float] | None
    prompt_tokens: int
    top_logprobs: list[dict[int, float]] | None = None
    score: float | None = None


@dataclass(frozen=True)
class Scored:
    """Log-likelihood of a given continuation.

    Attributes:
        logprob: natural logarithm of the probability of all its tokens.
        greedy: each of its tokens is the likeliest one.
        token_logprobs: of each token.
    """

    logprob: float
    greedy: bool
    token_logprobs: list[float]


def check_prompt(
    prompt: Sequence[int], settings: GenerationSettings, *, vocab_size: int, max_positions: int
) -> None:
    """Check one prompt against the model's sizes.

    Raises:
        ArgumentError: it is empty, has ids that the model lacks, or leaves no room for an answer.
    """
    if not prompt:
        raise ArgumentError("--prompt", "", "has no tokens", "write at least one word")
    for index in prompt:
        if not _whole(index) or not 0 <= index < vocab_size:
            raise ArgumentError(
                "--prompt",
                index,
                f"is no token of the model, which has {vocab_size}",
                "use the model's own tokenizer",
            )
    wanted = settings.new_tokens(len(prompt))
    if wanted < 1:
        raise ArgumentError(
            "--max-length",
            settings.max_length,
            f"the prompt alone has {len(prompt)} tokens, so that none may be added",
            f"raise it, or use {MAX_NEW_TOKENS}",
        )
    if len(prompt) + wanted > max_positions:
        limit = MAX_NEW_TOKENS if settings.max_new_tokens else "--max-length"
        raise ArgumentError(
            limit,
            settings.max_new_tokens or settings.max_length,
            f"a prompt of {len(prompt)} tokens and {wanted} new ones exceed the model's "
            f"{max_positions} positions",
            f"lower it or shorten the prompt to {max(1, max_positions - wanted)} tokens",
        )


def _given(index: int | None) -> tuple[int, ...]:
    return () if index is None else (index,)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
