"""A model without weights, for tests of what is around one: answers and scores follow from ids."""

from __future__ import annotations

import hashlib
import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from corpora import write_tokenizer

from mindspeed_models.inference.requests import Generated, GenerationRequest, Scored
from mindspeed_train.interface import tokenizer_of

OnText = Callable[[int, str], bool]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chance(ids: Sequence[int]) -> float:
    """A number between 0 and 1 that depends on ids."""
    digest = hashlib.sha256(",".join(map(str, ids)).encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


class FakeModel:
    """Answers with the texts that ``say`` returns for the text of a prompt, a token at a time.

    Attributes:
        batches: sizes of the batches that were asked for.
        asked: all requests.
        on_step: called before each token of a batch.
        failure: raised instead of an answer.
        closed: whether it has been closed.
    """

    def __init__(self, folder: Path, say: Callable[[str], str] | None = None, **more: Any) -> None:
        write_tokenizer(folder, bos=more.get("bos", False))
        self.tokenizer = tokenizer_of(
            Namespace(
                tokenizer_type="HuggingFaceTokenizer",
                tokenizer_model=str(folder / "tokenizer.json"),
                eod_token=None,
                vocab_file=None,
                merge_file=None,
                vocab_size=None,
            )
        )
        self.folder = folder
        self.vocab_size = self.tokenizer.vocab_size
        self.max_positions = more.get("max_positions", 512)
        self.chat_template = more.get("chat_template", CHATML)
        self.leader = True
        self.adapters = more.get("adapters", ())
        self.say = say or (lambda prompt: "it saw the house")
        self.batches: list[int] = []
        self.asked: list[GenerationRequest] = []
        self.scored: list[tuple[list[int], list[int]]] = []
        self.on_step: Callable[[int], None] = lambda step: None
        self.failure: Callable[[Sequence[GenerationRequest]], BaseException | None] = lambda requests: None
        self.closed = False

    def generate_requests(
        self, requests: Sequence[GenerationRequest], on_text: OnText | None = None
    ) -> list[Generated]:
        """Answer a batch, a token of each in turns."""
        self.batches.append(len(requests))
        self.asked += requests
        failure = self.failure(requests)
        if failure is not None:
            raise failure
        answers = [self.tokenizer.tokenize(self._said(request)) for request in requests]
        limits = [request.settings.new_tokens(len(request.prompt)) for request in requests]
        ids: list[list[int]] = [[] for _ in requests]
        texts = ["" for _ in requests]
        running = set(range(len(requests)))
        for step in range(max(limits)):
            self.on_step(step)
            for at in sorted(running):
                if step >= len(answers[at]) or step >= limits[at]:
                    running.discard(at)
                    continue
                ids[at].append(answers[at][step])
                text = self.tokenizer.detokenize(ids[at])
                new = text[len(texts[at]) :] if not text.endswith("\ufffd") else ""
                texts[at] += new
                if on_text is not None and new and not on_text(requests[at].request_id, new):
                    running.discard(at)
            if not running:
                break
        return [
            Generated(
                ids[at],
                self.tokenizer.detokenize(ids[at]),
                "length" if len(ids[at]) < len(answers[at]) else "stop",
                None
                if request.settings.logprobs is None
                else [math.log(chance(ids[at][: n + 1])) for n in range(len(ids[at]))],
                len(request.prompt),
                [self._likeliest(token, request.settings.logprobs) for token in ids[at]]
                if request.settings.logprobs
                else None,
            )
            for at, request in enumerate(requests)
        ]

    def _likeliest(self, token: int, count: int) -> dict[int, float]:
        """Return so many tokens from the one before ``token``, the likeliest first."""
        return {(token - 1 + more) % self.vocab_size: -1.0 - more for more in range(count)}

    def score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Scored]:
        """Score continuations by their ids."""
        self.scored += pairs
        results = []
        for context, continuation in pairs:
            each = [math.log(chance([*context, *continuation[: at + 1]])) for at in range(len(continuation))]
            results.append(Scored(sum(each), False, each))
        return results

    def close(self) -> None:
        """Note that it was closed."""
        self.closed = True

    def _said(self, request: GenerationRequest) -> str:
        text = self.say(self.tokenizer.detokenize(request.prompt))
        for stop in request.settings.stop:
            text = text.split(stop)[0]
        return text
