"""Answers in OpenAI's form: whole ones, and the pieces of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mindspeed_models.inference.requests import Generated
from mindspeed_models.inference.text_stream import INCOMPLETE
from mindspeed_models.serving.asked import Asked
from mindspeed_models.serving.prompts import Prompts

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Answer:
    """The envelope of the answers to one request.

    Attributes:
        asked: the request.
        prompts: spells tokens.
        key: its id.
        created: seconds since 1970.
    """

    asked: Asked
    prompts: Prompts
    key: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, results: Sequence[Generated]) -> dict[str, Any]:
        """Return the body of a request that does not stream."""
        choices = [self._whole_choice(index, result) for index, result in enumerate(results)]
        kind = "chat.completion" if self.asked.chat else "text_completion"
        return {**self._envelope(kind), "choices": choices, "usage": self.usage(results)}

    def opening(self, index: int) -> bytes | None:
        """Return what a stream says before the first text of a choice: the role, or the prompt."""
        if self.asked.chat:
            return self._event([self._piece(index, {"role": "assistant", "content": ""}, None)])
        echo = self.asked.echoes[index]
        return self._event([self._piece(index, echo, None)]) if echo else None

    def text(self, index: int, text: str) -> bytes:
        """Return an event with new text of a choice."""
        return self._event([self._piece(index, {"content": text} if self.asked.chat else text, None)])

    def end(self, index: int, result: Generated) -> bytes:
        """Return the last event of a choice."""
        piece = self._piece(index, {} if self.asked.chat else "", result.finish_reason)
        if self.asked.logprobs is not None:
            # They are known as a whole at the end; the text came before.
            piece["logprobs"] = self._logprobs(result)
        return self._event([piece])

    def usage_event(self, results: Sequence[Generated]) -> bytes:
        """Return the event with the numbers of tokens."""
        kind = "chat.completion.chunk" if self.asked.chat else "text_completion"
        return _sse({**self._envelope(kind), "choices": [], "usage": self.usage(results)})

    def usage(self, results: Sequence[Generated]) -> dict[str, int]:
        """Return the numbers of tokens."""
        generated = sum(len(result.tokens) for result in results)
        asked = self.asked.prompt_tokens
        return {"prompt_tokens": asked, "completion_tokens": generated, "total_tokens": asked + generated}

    def _whole_choice(self, index: int, result: Generated) -> dict[str, Any]:
        logprobs = None if self.asked.logprobs is None else self._logprobs(result)
        common = {"index": index, "finish_reason": result.finish_reason, "logprobs": logprobs}
        if self.asked.chat:
            return {**common, "message": {"role": "assistant", "content": result.text}}
        return {**common, "text": self.asked.echoes[index] + result.text}

    def _logprobs(self, result: Generated) -> dict[str, Any]:
        values = result.logprobs or []
        spelled = [self.prompts.spell([token]) for token in result.tokens]
        likeliest = [
            [(self.prompts.spell([token]), value) for token, value in each.items()]
            for each in result.top_logprobs or [{} for _ in values]
        ]
        if self.asked.chat:
            return {
                "content": [
                    {**_entry(text, value), "top_logprobs": [_entry(*each) for each in best]}
                    for text, value, best in zip(spelled, values, likeliest)
                ]
            }
        offsets = []
        # Beside them no prompt is echoed.
        at = 0
        for text in spelled:
            offsets.append(at)
            at += len(text)
        # The chosen token is among them, as OpenAI has it.
        top = [_by_text([*best, (own, chosen)]) for own, chosen, best in zip(spelled, values, likeliest)]
        return {
            "tokens": spelled,
            "token_logprobs": values,
            "top_logprobs": top if self.asked.logprobs else None,
            "text_offset": offsets,
        }

    def _piece(self, index: int, content: Any, reason: str | None) -> dict[str, Any]:
        name = "delta" if self.asked.chat else "text"
        return {"index": index, name: content, "finish_reason": reason, "logprobs": None}

    def _event(self, choices: list[dict[str, Any]]) -> bytes:
        kind = "chat.completion.chunk" if self.asked.chat else "text_completion"
        return _sse({**self._envelope(kind), "choices": choices})

    def _envelope(self, kind: str) -> dict[str, Any]:
        name = f"{'chatcmpl' if self.asked.chat else 'cmpl'}-{self.key}"
        return {"id": name, "object": kind, "created": self.created, "model": self.asked.model}


def _by_text(best: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Return log-probabilities by text; of tokens that are spelled alike the first, which is the likelier."""
    found: dict[str, float] = {}
    for text, value in best:
        found.setdefault(text, value)
    return found


def _entry(text: str, logprob: float) -> dict[str, Any]:
    """Return a token of a chat; a part of a character has no bytes that its text could tell."""
    own = None if INCOMPLETE in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": own}


def error_event(body: dict[str, object]) -> bytes:
    """Return a failure inside of a stream that has begun."""
    return _sse(body)


def _sse(value: Any) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"
