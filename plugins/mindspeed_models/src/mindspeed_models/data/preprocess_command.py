"""``mindspeed-models preprocess``: AscendSpeed's ``preprocess_data.py`` with all its flags, and more."""

from __future__ import annotations

import sys
from typing import Any

import click

from mindspeed_core.errors import ArgumentError
from mindspeed_core.terminal.foreign_text import emit

_TYPES = (
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "GPT2BPETokenizer",
    "PretrainedFromHF",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
)
_SEVERAL = ("--json-keys", "--json-key", "--datasets")


class SeveralValues(click.Command):
    """A command some of whose flags take all values up to the next flag, as argparse's ``nargs="+"``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeat such a flag before each of its values."""
        spread: list[str] = []
        flag = ""
        first = False
        for word in args:
            if word.startswith("--"):
                flag = word if word in _SEVERAL else ""
                first = True
                spread.append(word)
            elif flag and not first:
                spread += [flag, word]
            else:
                first = False
                spread.append(word)
        return super().parse_args(ctx, spread)


@click.command("preprocess", cls=SeveralValues)
@click.option("--input", "source", help="A file or folder of records, or the name of a data set.")
@click.option("--handler-name", default="", help="What a record becomes; GeneralPretrainHandler without.")
@click.option("--streaming", is_flag=True, help="Read a data set of `datasets` without storing it.")
@click.option("--hf-datasets-params", type=click.Path(), help="JSON file with arguments of load_dataset.")
@click.option("--datasets", multiple=True, help="Further inputs, joined in order.")
@click.option(
    "--json-keys", "--json-key", multiple=True, default=("text",), show_default=True, help="Fields of text."
)
@click.option("--split-sentences", is_flag=True, help="Split documents into sentences (needs nltk).")
@click.option("--keep-newlines", is_flag=True, help="Keep newlines between sentences.")
@click.option(
    "--dataset-format",
    type=click.Choice(("alpaca", "sharegpt", "openai")),
    help="How conversations are stored.",
)
@click.option("--chat-template", help="A template by name, a file, or `tokenizer` for its own.")
@click.option(
    "--train-on",
    type=click.Choice(("last", "assistant", "all")),
    default="last",
    show_default=True,
    help="The last answer, all answers, or everything.",
)
@click.option(
    "--tokenize",
    type=click.Choice(("whole", "segments")),
    default="whole",
    show_default=True,
    help="A conversation as a whole, or each answer apart from its prompt.",
)
@click.option("--tokenizer-type", required=True, type=click.Choice(_TYPES), help="Type of the tokenizer.")
@click.option("--tokenizer-name-or-path", "--tokenizer-model", "tokenizer", help="Its folder or file.")
@click.option("--tokenizer-not-use-fast", is_flag=True, help="Accepted; fast tokenizers give the same ids.")
@click.option("--vocab-file", type=click.Path(), help="Vocabulary of GPT2BPETokenizer.")
@click.option("--merge-file", type=click.Path(), help="Merges of GPT2BPETokenizer.")
@click.option("--append-eod", is_flag=True, help="End every document with the token for that.")
@click.option("--eod-token", help="That token, where it is not the tokenizer's own.")
@click.option("--no-bos", is_flag=True, help="Leave out what the tokenizer puts before and behind texts.")
@click.option("--seq-length", type=int, help="Longest sample of instruction data.")
@click.option(
    "--overlong",
    type=click.Choice(("drop", "truncate", "error")),
    default="drop",
    show_default=True,
    help="What happens to longer ones.",
)
@click.option(
    "--make-vocab-size-divisible-by",
    type=int,
    default=128,
    show_default=True,
    help="Of the model that is trained.",
)
@click.option("--pad-vocab-size-to", type=int, help="Likewise.")
@click.option("--output-prefix", required=True, type=click.Path(), help="Where the files go.")
@click.option(
    "--dataset-impl",
    type=click.Choice(("lazy", "cached", "mmap")),
    default="mmap",
    show_default=True,
    help="Format of the files.",
)
@click.option(
    "--max-bad-ratio", type=float, default=1e-3, show_default=True, help="Largest share of refused records."
)
@click.option("--overwrite", is_flag=True, help="Replace a dataset of other records or settings.")
@click.option("--keep-parts", is_flag=True, help="Leave PREFIX.parts behind.")
@click.option("--workers", default=1, show_default=True, help="Processes; the result is the same for any.")
@click.option(
    "--log-interval", type=int, default=100, show_default=True, help="Parts between two lines of progress."
)
def command(**options: Any) -> None:
    """Turn records into the files that training reads.

    Records are JSON lines, JSON lists, Parquet, CSV, Arrow or text. When the program is interrupted, the same
    command goes on where it stopped. What cannot be used stands in PREFIX.rejected.jsonl.
    """
    _run(**options)


def _run(
    source: str | None,
    streaming: bool,
    hf_datasets_params: str | None,
    datasets: tuple[str, ...],
    output_prefix: str,
    dataset_impl: str,
    max_bad_ratio: float,
    overwrite: bool,
    keep_parts: bool,
    workers: int,
    log_interval: int,
    pad_vocab_size_to: int | None,
    make_vocab_size_divisible_by: int,
    **options: Any,
) -> None:
    from mindspeed_models.data.preprocess import preprocess
    from mindspeed_models.data.settings import Settings
    from mindspeed_models.data.tokenizers import TokenizerChoice, load_encoder

    if dataset_impl != "mmap":
        raise ArgumentError("--dataset-impl", dataset_impl, "is read by nothing any more", "use mmap")
    choice = TokenizerChoice(
        kind=options.pop("tokenizer_type"),
        path=options.pop("tokenizer"),
        fast=not options.pop("tokenizer_not_use_fast"),
        vocab_file=options.pop("vocab_file"),
        merge_file=options.pop("merge_file"),
        eod_token=options.pop("eod_token"),
        bos=not options.pop("no_bos"),
    )
    settings = Settings(choice, **{**options, "json_keys": tuple(options["json_keys"])})
    inputs, hub = _sources(source, streaming, hf_datasets_params, datasets)
    if pad_vocab_size_to is not None and pad_vocab_size_to < (ids := load_encoder(choice).vocab_size):
        reason = f"the tokenizer has {ids} ids"
        raise ArgumentError("--pad-vocab-size-to", pad_vocab_size_to, reason, "use as many or more")

    def print_part(done: int, parts: int) -> None:
        if not sys.stderr.isatty() and done % max(log_interval, 1) == 0:
            emit(f"finished {done} of {parts} parts", err=True)

    made = preprocess(
        inputs,
        output_prefix,
        settings,
        hub=hub,
        workers=workers,
        max_bad_ratio=max_bad_ratio,
        overwrite=overwrite,
        keep_parts=keep_parts,
        progress=sys.stderr.isatty(),
        on_part=print_part,
    )
    size = max(made.vocab_size, pad_vocab_size_to or 0)
    _report(made, -(-size // make_vocab_size_divisible_by) * make_vocab_size_divisible_by)


def _sources(
    source: str | None, streaming: bool, params: str | None, further: tuple[str, ...]
) -> tuple[list[str], dict[str, Any] | None]:
    """Return files and folders, or the arguments of ``load_dataset``."""
    from pathlib import Path

    from mindspeed_models.data.hub import read_params

    if params is not None:
        found = read_params(params)
        return [], {**found, "streaming": True} if streaming else found
    inputs = [*([] if source is None else [source]), *further]
    if not inputs:
        raise ArgumentError("--input", None, "nothing to read is named", "name a file or a folder of records")
    if len(inputs) == 1 and not Path(inputs[0]).exists() and _is_name(inputs[0]):
        return [], {"path": inputs[0], "split": "train", "streaming": streaming}
    return inputs, None


def _is_name(given: str) -> bool:
    """Return whether it may be the name of a data set: OWNER/NAME, without the ending of a file."""
    from mindspeed_models.data.records import FORMATS

    parts = given.split("/")
    return (
        len(parts) == 2
        and all(parts)
        and parts[1].rpartition(".")[2] not in FORMATS
        and given[0] not in "./~"
    )


def _report(made: Any, padded: int) -> None:
    counts = made.counts
    if made.reused:
        emit(f"reused           {made.reused:,} parts of an interrupted run")
    emit(f"records          {made.records:,}")
    if made.refused:
        emit(f"refused          {made.refused:,}, in {made.rejected}")
    emit(f"samples          {counts.samples:,}")
    emit(f"tokens           {counts.tokens:,}")
    if counts.trained:
        emit(f"trained          {counts.trained:,} ({counts.trained / counts.tokens:.1%})")
    if counts.overlong:
        emit(
            f"overlong         {counts.overlong:,}, of which {counts.dropped:,} were left out and "
            f"{counts.cut:,} lost a part of an answer"
        )
    if counts.merged:
        emit(
            f"merged           {counts.merged:,} of {counts.answers:,} answers begin inside a token of their "
            "prompt"
        )
        if counts.merged > counts.answers / 100:
            emit(
                "                 generation will see other tokens there: let the marker of an answer not "
                "end in a blank, or use --tokenize segments"
            )
    emit(f"vocabulary       {made.vocab_size:,}, padded {padded:,}")
    for prefix in made.prefixes:
        emit(f"written          {prefix}.bin, .idx")
