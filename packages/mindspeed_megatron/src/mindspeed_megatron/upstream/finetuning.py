"""MindSpeed-LLM's flags of records, weights and finetuning, in terms of mindspeed-models."""

from __future__ import annotations

from mindspeed_megatron.upstream.given import (
    ChangesNothing,
    Given,
    Line,
    Outcome,
    Refused,
    Translated,
    Translation,
)

_INSTRUCTIONS = "--is-instruction-dataset"


def noted_as(reason: str) -> Translation:
    """Return the translation of a flag that changes nothing here, with its reason."""

    def translate(given: Given, line: Line) -> Outcome:
        return ChangesNothing(reason)

    return translate


prepared = noted_as(
    "`mindspeed-models preprocess` takes it when records are prepared; --data-path names its files"
)
"""The translation of what says how records become samples."""


def stage(given: Given, line: Line) -> Outcome:
    """``--stage``: pretraining and supervised finetuning."""
    if given.words == ("pt",):
        return ChangesNothing("a pretraining is what runs")
    if given.words != ("sft",):
        word = " ".join(given.words) or "without a value"
        return Refused(f"{word} is not trained here: no preferences, no rewards", "use sft")
    if line.has(_INSTRUCTIONS):
        return ChangesNothing(f"{_INSTRUCTIONS} says it")
    return Translated((_INSTRUCTIONS,))


def unpadded(given: Given, line: Line) -> Outcome:
    """``--no-pad-to-seq-lengths``: instruction data in micro-batches of their own length."""
    if not line.has(_INSTRUCTIONS, "--stage"):
        return ChangesNothing("samples of a pretraining fill --seq-length")
    if line.has("--pack", "--neat-pack"):
        return ChangesNothing("rows of packed samples fill --seq-length")
    return Translated(("--variable-seq-lengths",))


def packed(given: Given, line: Line) -> Outcome:
    """``--pack``: several samples a row; without ``--neat-pack`` they would see one another."""
    if line.has("--neat-pack", "--pack-samples"):
        return ChangesNothing("--pack-samples says it")
    return Refused("the samples of a row would attend to one another", "use --pack-samples: they do not")


def packed_apart(given: Given, line: Line) -> Outcome:
    """``--neat-pack``: several samples a row, each by itself."""
    if line.has("--pack-samples"):
        return ChangesNothing("--pack-samples says it")
    return Translated(("--pack-samples",))


def fewer_bits(given: Given, line: Line) -> Outcome:
    """``--o2-optimizer``: Adam's moments in bfloat16."""
    if line.has("--quant-states"):
        return ChangesNothing("--quant-states says it")
    return Translated(
        ("--quant-states", "bf16"), "Adam's moments are kept in bfloat16, rounded stochastically"
    )


def gradients_of_16_bits(given: Given, line: Line) -> Outcome:
    """``--o2-gradient``: gradients in buffers of bfloat16."""
    if line.has("--quant-grads"):
        return ChangesNothing("--quant-grads says it")
    return Translated(("--quant-grads",))
