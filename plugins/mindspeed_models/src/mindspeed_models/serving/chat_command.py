"""``mindspeed-models chat``: a conversation with a model in the terminal."""

from __future__ import annotations

from typing import Any

import click

from mindspeed_core.terminal.foreign_text import emit
from mindspeed_models.inference.requests import GenerationSettings
from mindspeed_models.serving.model_options import layout_command, model_of, model_options


@layout_command("chat", "A conversation in the terminal.")
@model_options
@click.option("--system", default="", metavar="TEXT", help="System message.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Longest answer; the oldest turns make room for it.",
)
@click.option("--greedy", is_flag=True, help="Take the likeliest token instead of drawing one.")
@click.option("--temperature", type=float, default=0.7, show_default=True, help="Temperature of the drawing.")
@click.option(
    "--top-k", type=int, default=50, show_default=True, help="Likeliest tokens to draw from; 0 for all."
)
@click.option(
    "--top-p", type=float, default=0.95, show_default=True, help="Probability of the tokens to draw from."
)
@click.option(
    "--repetition-penalty", type=float, default=1.0, show_default=True, help="Penalty of tokens seen."
)
@click.option("--seed", type=int, help="Seed of the drawing; another one for each answer by default.")
def chat_command(**given: Any) -> None:
    """Talk with a model: turns are kept, answers appear while they grow, Ctrl-C interrupts one.

    FLAGS are further flags of the host. Under torchrun the first rank reads the terminal.
    """
    from mindspeed_models.serving.chat import HELP, Chat, in_foreground, reader
    from mindspeed_models.serving.serve_command import signals_ignored

    options = model_of(given)
    seed = given["seed"]
    settings = GenerationSettings(
        do_sample=not given["greedy"],
        temperature=given["temperature"],
        top_k=given["top_k"],
        top_p=given["top_p"],
        repetition_penalty=given["repetition_penalty"],
        max_new_tokens=given["max_new_tokens"],
        seed=seed or 0,
    )
    settings.validate()
    with options.open() as model:
        if not model.leader:
            with signals_ignored():
                model.follow()
            return
        settings.validate(vocab_size=model.vocab_size, max_positions=model.max_positions)
        chat = Chat(model, options.prompts(model), settings, system=given["system"], seeded=seed is not None)
        chat.check()
        emit(HELP)
        with in_foreground():
            chat.run(reader("> "))
