"""``mindspeed-train data check PREFIX``: whether a dataset is whole, and what it is."""

from __future__ import annotations

import json

import click

from mindspeed_core.errors import DataError, UserError


@click.group("data")
def command() -> None:
    """Look at tokenized datasets."""


@command.command("check")
@click.argument("prefixes", nargs=-1, required=True, metavar="PREFIX...")
@click.option("--full", is_flag=True, help="Read all tokens: their digest, and the largest id.")
@click.option("--tokenizer-model", help="Compare the ids with this tokenizer; needs --full.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def check(prefixes: tuple[str, ...], full: bool, tokenizer_model: str | None, as_json: bool) -> int:
    """Check .bin and .idx of each PREFIX: every field against those that it follows from.

    Prints the digest that checkpoints keep of their training data. Exit status 1 where one is damaged.
    """
    from mindspeed_core.terminal.foreign_text import emit, shown
    from mindspeed_train.data.files import check_dataset_files, token_counts
    from mindspeed_train.data.identity import digest_of

    limit = None
    if tokenizer_model is not None:
        from mindspeed_train.text.tokenizer import load_tokenizer

        limit, full = load_tokenizer(tokenizer_model).vocab_size, True
    found, failed = [], False
    for prefix in prefixes:
        try:
            files = check_dataset_files(prefix, "data check")
            entry: dict[str, object] = {
                "prefix": prefix,
                "documents": files.documents,
                "sequences": files.sequences,
                "tokens": files.tokens,
                "dtype": files.dtype.name,
                "digest": digest_of(prefix),
            }
            if full:
                entry["full_digest"] = digest_of(prefix, full=True)
                entry["largest_id"] = largest = len(token_counts(prefix)) - 1
                if limit is not None and largest >= limit:
                    raise DataError(
                        f"{prefix}.bin contains the id {largest}, the tokenizer has {limit} ids; name the "
                        "tokenizer that it was made with"
                    )
        except (UserError, OSError) as error:
            failed, entry = True, {"prefix": prefix, "problem": shown(error, 2000)}
        found.append(entry)
    if as_json:
        emit(json.dumps(found, indent=1))
        return int(failed)
    for entry in found:
        emit(f"{shown(entry.pop('prefix'))}: {'damaged' if 'problem' in entry else 'whole'}")
        for name, value in entry.items():
            emit(f"  {name.replace('_', ' ')}: {value:,}" if isinstance(value, int) else f"  {name}: {value}")
    return int(failed)
