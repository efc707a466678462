"""``mindspeed-models generate``: prompts of the command line or of a file, in one process or several."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from mindspeed_core.errors import ArgumentError, NamedFileError
from mindspeed_core.terminal.foreign_text import emit
from mindspeed_models.inference.prompt_files import Prompt, answered, parts, read_prompts
from mindspeed_models.inference.requests import GenerationRequest, GenerationSettings
from mindspeed_train.interface import parallel_command

if TYPE_CHECKING:
    from mindspeed_models.inference.model import LoadedModel
    from mindspeed_models.inference.requests import Generated

_WORDS = "mindspeed_models_words"
_FOLDER = click.Path(path_type=Path)
DEFAULTS = GenerationSettings()


class WordsKept(click.Command):
    """A command that knows the words it was called with, to start itself in several processes."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Remember the command line."""
        ctx.meta[_WORDS] = list(args)
        return super().parse_args(ctx, args)


def _number(name: str, default: Any, text: str, **more: Any) -> Any:
    return click.option(name, type=type(default), default=default, show_default=True, help=text, **more)


@parallel_command
@click.command(
    "generate",
    cls=WordsKept,
    short_help="Continue prompts with a trained model.",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "max_content_width": 100},
)
@click.option("--load", required=True, metavar="FOLDER", help="A checkpoint, or a Hugging Face folder.")
@click.option(
    "--lora-load", "lora", multiple=True, type=_FOLDER, help="An adapter; may be given several times."
)
@click.option("--adapter", help="Name of the adapter that prompts of the command line use.")
@click.option("--prompt", "prompts", multiple=True, help="A prompt; may be given several times.")
@click.option("--prompt-file", type=_FOLDER, help="Prompts, one a line; JSON objects in a .jsonl file.")
@click.option("--output", type=_FOLDER, help="JSON lines with the answers; on the screen without.")
@click.option("--resume", is_flag=True, help="Leave out prompts whose answers --output has.")
@click.option("--tensor-model-parallel-size", "--tp", "tp", type=int, default=1, help="Ranks of a layer.")
@click.option("--pipeline-model-parallel-size", "--pp", "pp", type=int, default=1, help="Pipeline stages.")
@click.option("--expert-model-parallel-size", "--ep", "ep", type=int, default=1, help="Ranks of experts.")
@click.option("--nproc", type=int, help="Processes on this machine; as many as the sizes need without.")
@click.option("--platform", help="cpu, cuda or npu; found out without.")
@click.option("--do-sample", is_flag=True, help="Draw tokens; without, the likeliest is taken.")
@click.option("--greedy", is_flag=True, help="Take the likeliest token, as without --do-sample.")
@_number("--top-k", DEFAULTS.top_k, "Draw from so many likeliest tokens; 0 from all.")
@_number("--top-p", DEFAULTS.top_p, "Draw from the fewest tokens with this probability together.")
@_number("--temperature", DEFAULTS.temperature, "Logits are divided by it; 0 is greedy.")
@_number("--num-beams", DEFAULTS.num_beams, "Beams of beam search.")
@_number("--max-length", DEFAULTS.max_length, "Tokens of prompt and answer, without --max-new-tokens.")
@_number("--max-new-tokens", DEFAULTS.max_new_tokens, "Tokens of an answer; 0 leaves it to --max-length.")
@_number("--min-new-tokens", DEFAULTS.min_new_tokens, "No answer ends before so many tokens.")
@click.option("--eos-token-id", "eos", type=int, multiple=True, help="A token that ends answers.")
@click.option("--bos-token-id", "bos", type=int, help="A token that prompts begin with.")
@click.option("--pad-token-id", "pad", type=int, help="Accepted; answers are not filled up.")
@click.option("--stop", multiple=True, help="A text that ends answers.")
@_number("--seed", DEFAULTS.seed, "Of the drawing.")
@_number("--repetition-penalty", DEFAULTS.repetition_penalty, "Logits of tokens seen are divided by it.")
@_number("--length-penalty", DEFAULTS.length_penalty, "Exponent of the length in a beam's score.")
@_number("--num-return-sequences", DEFAULTS.num_return_sequences, "Hypotheses of beam search to return.")
@click.option("--logprobs", type=int, help="Return log-probabilities of so many likeliest tokens too.")
@click.option("--return-output-log-probs", is_flag=True, help="Return those of the answers' tokens.")
@click.option("--detokenize/--no-detokenize", default=True, help="Show text, or ids.")
@click.option("--include-input", is_flag=True, help="Show the prompt before the answer.")
@click.option("--stream", is_flag=True, help="Show the text while it grows; one prompt.")
@_number("--prefill-chunk", 0, "Tokens of a prompt to compute at once; 0 for all.")
@_number("--batch-size", 8, "Prompts that are computed together.")
@click.option("--chat-template", help="A template by name, or a file; the tokenizer's own without.")
@click.option("--recompute", is_flag=True, help="Accepted; keys and values are cached.")
@click.option("--ds-inference", is_flag=True, help="Accepted; the cache is always used.")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(context: click.Context, **given: Any) -> int:
    """Continue prompts with a trained model.

    FLAGS are those of mindspeed-train: --bf16, --tokenizer-model, those of the model where the checkpoint
    does not describe it.
    """
    world = given["nproc"] or _ranks(given)
    if world > 1 and "RANK" not in os.environ:
        from mindspeed_train.interface import run_train_program

        return int(run_train_program(["--nproc", str(world), "generate", *context.meta[_WORDS]]))
    from mindspeed_megatron.quiet import quieten

    quieten()
    prompts, settings = _prompts(given), settings_of(given)
    _check(given, prompts, settings)
    done = _answered(given, prompts, settings)
    from mindspeed_models.inference.model import load

    with load(
        given["load"],
        tp=given["tp"],
        pp=given["pp"],
        ep=given["ep"],
        lora=given["lora"],
        platform=given["platform"],
        flags=given["flags"],
        prefill_chunk=given["prefill_chunk"],
        batch_size=given["batch_size"],
        chat_template=given["chat_template"],
    ) as model:
        if not model.leader:
            # The first rank alone has the file of answers: machines need not share a file system.
            model.follow()
            return 0
        _run(model, [each for each in prompts if each.name not in done], settings, given)
    return 0


def settings_of(given: dict[str, Any]) -> GenerationSettings:
    """Return the settings that options name; checked as far as no model is needed.

    Raises:
        ArgumentError: one cannot work.
    """
    if given["greedy"] and given["do_sample"]:
        raise ArgumentError("--greedy", None, "--do-sample draws tokens", "drop one of the two")
    wants = 0 if given["return_output_log_probs"] and given["logprobs"] is None else given["logprobs"]
    same = (
        "do_sample top_k top_p temperature num_beams max_new_tokens max_length min_new_tokens stop seed "
        "repetition_penalty length_penalty num_return_sequences"
    ).split()
    settings = GenerationSettings(
        **{name: given[name] for name in same},
        eos_token_ids=given["eos"] or None,
        pad_token_id=given["pad"],
        bos_token_id=given["bos"],
        logprobs=wants,
    )
    settings.validate(stream=given["stream"])
    return settings


def _ranks(given: dict[str, Any]) -> int:
    """Return how many processes the sizes need; what is no size is refused where the model is loaded."""
    return max(1, given["tp"]) * max(1, given["pp"]) * max(1, given["ep"])


def _prompts(given: dict[str, Any]) -> list[Prompt]:
    if bool(given["prompts"]) == (given["prompt_file"] is not None):
        reason = "--prompt-file is given too" if given["prompts"] else "there is nothing to continue"
        raise ArgumentError("--prompt", None, reason, "give --prompt TEXT, or --prompt-file FILE")
    if given["prompt_file"] is not None:
        return read_prompts(given["prompt_file"])
    return [
        Prompt(str(number), text, number, given["adapter"]) for number, text in enumerate(given["prompts"])
    ]


def _answered(given: dict[str, Any], prompts: list[Prompt], settings: GenerationSettings) -> set[str]:
    output: Path | None = given["output"]
    if output is None:
        if given["resume"]:
            raise ArgumentError("--resume", None, "there is no file of answers", "add --output FILE")
        return set()
    if not given["resume"]:
        if output.exists():
            raise NamedFileError("--output", str(output), "is there already", "add --resume, or name another")
        return set()
    return answered(
        output,
        {each.name: each.settings_with(settings).num_return_sequences for each in prompts},
        cut=os.environ.get("RANK", "0") == "0",
    )


def _check(given: dict[str, Any], prompts: list[Prompt], settings: GenerationSettings) -> None:
    if given["stream"] and (len(prompts) > 1 or given["output"] is not None):
        raise ArgumentError(
            "--stream", None, "shows one answer on the screen", "give one --prompt and no --output"
        )
    for each in prompts:
        each.settings_with(settings).validate(stream=given["stream"])


def _run(
    model: LoadedModel, prompts: list[Prompt], settings: GenerationSettings, given: dict[str, Any]
) -> None:
    """Continue prompts and write the answers, on the rank that leads; a batch of every rank at a time."""
    ranks = model.run.pg.dp.size()
    output: Path | None = given["output"]
    opened: Any = nullcontext(None)
    if output is not None:
        opened = output.open("a", encoding="utf-8")
    with opened as file:
        for part in parts(prompts, given["batch_size"] * ranks):
            requests = [
                GenerationRequest(
                    model.encode(each.content), each.settings_with(settings), each.number, each.adapter
                )
                for each in part
            ]
            if given["stream"]:
                _stream(model, requests)
                continue
            found = model.generate_hypotheses(requests)
            for prompt, request, answers in zip(part, requests, found):
                _show(model, prompt, request, answers, given, file, alone=len(prompts) == 1)


def _stream(model: LoadedModel, requests: list[GenerationRequest]) -> None:
    def show(number: int, new: str) -> bool:
        sys.stdout.write(new)
        sys.stdout.flush()
        return True

    model.generate_requests(requests, show)
    emit("")


def _show(
    model: LoadedModel,
    prompt: Prompt,
    request: GenerationRequest,
    answers: list[Generated],
    given: dict[str, Any],
    file: TextIO | None,
    *,
    alone: bool,
) -> None:
    """Write one prompt's answers: a line of JSON into a file or for one of several, else plainly."""
    before = model.tokenizer.detokenize(request.prompt) if given["include_input"] else ""
    lines = [
        before + each.text
        if given["detokenize"]
        else " ".join(map(str, [*(request.prompt if given["include_input"] else []), *each.tokens]))
        for each in answers
    ]
    if file is None and alone and answers[0].logprobs is None:
        for line in lines:
            emit(line)
        return
    for line, each in zip(lines, answers):
        record: dict[str, Any] = {
            "id": prompt.name,
            "text": line,
            "tokens": each.tokens,
            "finish_reason": each.finish_reason,
            "prompt_tokens": each.prompt_tokens,
        }
        for name in ("logprobs", "top_logprobs", "score"):
            value = getattr(each, name)
            if value is not None:
                record[name] = value
        text = json.dumps(record, ensure_ascii=False)
        if file is None:
            emit(text)
        else:
            file.write(text + "\n")
            file.flush()
