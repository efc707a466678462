"""``mindspeed-train sample``: continue a prompt with a trained model.

Opens a session in mode ``inference`` (no optimizer, no data), loads the weights of a checkpoint and extends
the prompt. A package that generates (entry-point group ``mindspeed.continuations``) does so with a cache and
over pipeline stages; without one the whole context is recomputed for each token, which is meant to look at a
model, not to serve it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import click

from mindspeed_core.discovery.entry_points import Installed
from mindspeed_core.errors import ArgumentError
from mindspeed_core.run import Run
from mindspeed_train.launch.commands import parallel_command

CONTINUATIONS = "mindspeed.continuations"
"""Entry points of functions with the arguments and the result of `generate`, for any layout."""


def continuation() -> Callable[..., list[int]] | None:
    """Return the function of an installed package that continues prompts; None where there is none."""
    found = Installed().sources(CONTINUATIONS)
    if not found:
        return None
    loaded: Callable[..., list[int]] = found[0].load()
    return loaded


def generate(run: Run, prompt: Sequence[int], length: int, *, top_k: int = 0, seed: int = 0) -> list[int]:
    """Extend a prompt.

    Args:
        run: a run in mode ``inference``; pipeline size 1, any tensor-parallel size.
        prompt: token ids; at least one.
        length: how many tokens to add.
        top_k: draw from the ``top_k`` likeliest tokens; 0 takes the likeliest.
        seed: of the drawing; the same on every rank, so that all ranks draw the same tokens.

    Returns:
        Prompt and continuation.
    """
    import torch
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    generator = torch.Generator().manual_seed(seed)
    window = run.args.seq_length
    tokens = list(prompt)
    model = run.model[0]
    with torch.no_grad():
        for _ in range(length):
            context = tokens[-window:]
            # Sequence parallelism shards the sequence, so the context is padded to a full window; attention
            # is causal (it makes its own mask), so the padding never reaches the position that is read.
            padded = context + [context[-1]] * (window - len(context))
            ids = torch.tensor([padded], device=run.dist.device)
            positions = torch.arange(window, device=run.dist.device).unsqueeze(0)
            logits = model(ids, positions, None)
            logits = gather_from_tensor_model_parallel_region(logits)
            scores = logits[0, len(context) - 1, : run.args.vocab_size].float().cpu()
            if top_k:
                values, indices = torch.topk(scores, min(top_k, scores.numel()))
                chosen = torch.multinomial(torch.softmax(values, dim=-1), 1, generator=generator)
                tokens.append(int(indices[chosen]))
            else:
                tokens.append(int(scores.argmax()))
    return tokens


@parallel_command
@click.command(
    "sample",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "max_content_width": 100},
)
@click.option("--prompt", default="The ", show_default=True, help="Text to continue.")
@click.option("--length", default=60, show_default=True, help="Tokens to add.")
@click.option(
    "--top-k", default=0, show_default=True, help="Draw from the k likeliest; 0 takes the likeliest."
)
@click.option("--sample-seed", default=0, show_default=True, help="Seed of the drawing.")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def command(prompt: str, length: int, top_k: int, sample_seed: int, flags: tuple[str, ...]) -> int:
    """Continue a prompt. FLAGS are the training run's own flags, with --load and --tokenizer-model."""
    from mindspeed_core.activation import prepare
    from mindspeed_train.loop import setup, teardown
    from mindspeed_train.text.tokenizer import NullTokenizer

    with prepare(list(flags), host="standalone", mode="inference") as session:
        if not session.args.load:
            raise ArgumentError("--load", None, "sample continues with a trained model", "name its folder")
        run = setup(session)
        tokenizer = run.tokenizer
        if isinstance(tokenizer, NullTokenizer):
            raise ArgumentError(
                "--tokenizer-model", None, "ids alone cannot be shown as text", "name the tokenizer"
            )
        prompt_ids = tokenizer.tokenize(prompt)
        continued = continuation()
        if run.pg.pp.size() == 1 and len(prompt_ids) + length > run.args.max_position_embeddings:
            # Beyond the model's positions only the last tokens are read, which no cache holds.
            continued = None
        if run.pg.pp.size() > 1 and continued is None:
            raise ArgumentError(
                "--pipeline-model-parallel-size",
                run.pg.pp.size(),
                "sample runs without a pipeline; a checkpoint loads under another layout",
                "use 1, or install mindspeed-models",
            )
        tokens = (continued or generate)(run, prompt_ids, length, top_k=top_k, seed=sample_seed)
        if run.dist.rank == 0:
            click.echo(tokenizer.detokenize(tokens))
        teardown(session)
    return 0
