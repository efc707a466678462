"""A model that generates and scores: `load`, `from_pretrained` and `LoadedModel`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from mindspeed_models.inference.requests import Generated, GenerationRequest, Scored

OnText = Callable[[int, str], bool]
"""Gets a request's id and its new text; False cancels that request."""


class LoadedModel:
    """A model in an open session of mode ``inference``.

    Every rank of the layout has one. Calls are made on all ranks alike, or by the leader while all others
    `follow`.

    Attributes:
        tokenizer: of the host: ``tokenize(text)``, ``detokenize(ids)``, ``eod``; None where only ids are used.
        max_positions: tokens of prompt and answer together at most.
        vocab_size: tokens that may be drawn; padded rows are not among them.
        chat_template: Jinja text of the tokenizer's chat template; empty for none.
        leader: this rank is the one that asks while others follow.
    """

    tokenizer: Any
    max_positions: int
    vocab_size: int
    chat_template: str
    leader: bool

    def generate(self, prompts: Any = None, *, stream: bool = False, **settings: Any) -> Any:
        """Continue one or several prompts; takes the seed's keywords."""
        raise SystemError

    def generate_requests(
        self, requests: Sequence[GenerationRequest], on_text: OnText | None = None
    ) -> list[Generated]:
        """Continue requests in one batch, each with its own settings; results in their order."""
        raise SystemError

    def score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Scored]:
        """Return log-likelihoods of continuations (second) given contexts (first)."""
        raise SystemError

    def follow(self) -> None:
        """Run what the leader is asked until it closes; for every other rank."""
        raise SystemError

    def close(self) -> None:
        """End the session; followers return from `follow`."""
        raise SystemError

    def __enter__(self) -> LoadedModel:
        """Return the model."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the model."""
        self.close()


def load(
    path: str | Path,
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    lora: Sequence[str | Path] = (),
    platform: str | None = None,
    flags: Sequence[str] = (),
    prefill_chunk: int = 0,
) -> LoadedModel:
    """Open a session in mode ``inference`` and load a model.

    Args:
        path: a checkpoint of a training, a Hugging Face folder, or a checkpoint of Megatron-LM.
        tp: tensor-parallel size.
        pp: pipeline size.
        ep: expert-parallel size.
        lora: folders of adapters; requests name one by its folder's name.
        platform: ``cpu``, ``cuda`` or ``npu``; found out by default.
        flags: further flags of the host, such as ``--bf16``.
        prefill_chunk: tokens of a prompt to compute at once; 0 for all.
    """
    raise SystemError


def from_pretrained(model_provider: Any, path: str | Path, **options: Any) -> LoadedModel:
    """Load a model as the seed's ``from_pretrained`` does; the model's own files say how it is built."""
    raise SystemError


Stream = Iterator[str]
