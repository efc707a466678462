"""The continuation of one prompt for ``mindspeed-train sample``, with a cache and over pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mindspeed_core.run import Run


def continue_prompt(
    run: Run, prompt: Sequence[int], length: int, *, top_k: int = 0, seed: int = 0
) -> list[int]:
    """Return a prompt and its continuation; no token ends it. Collective.

    Args:
        run: a run in mode ``inference``.
        prompt: token ids; at least one.
        length: how many tokens to add.
        top_k: draw from the ``top_k`` likeliest tokens; 0 takes the likeliest.
        seed: of the drawing.
    """
    from mindspeed_models.inference.model import generating
    from mindspeed_models.inference.requests import GenerationRequest, GenerationSettings

    settings = GenerationSettings(
        do_sample=top_k > 0, top_k=top_k, max_new_tokens=length, eos_token_ids=(), seed=seed
    )
    with generating(run) as model:
        (found,) = model.generate_requests([GenerationRequest(list(prompt), settings)])
    return [*prompt, *found.tokens]
