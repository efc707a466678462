"""Default stage of the tokenizer, and the one tokenizer of a session.

It is built while arguments are validated, since the model's vocabulary follows from it; datasets,
``run.tokenizer`` and sampling use the same object.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import DataError
from mindspeed_core.feature import hookimpl
from mindspeed_train.arguments.errors import argument_error
from mindspeed_train.text.tokenizer import Tokenizer, tokenizer_of

if TYPE_CHECKING:
    from mindspeed_core.session import Session


@dataclass
class BuiltTokenizer:
    """The tokenizer of a session; None before arguments are validated."""

    tokenizer: Any = None


@hookimpl(trylast=True)
def build_tokenizer(args: Namespace) -> Tokenizer:
    """Build the tokenizer that the flags name, or plain ids up to ``--vocab-size``."""
    tokenizer = tokenizer_of(args)
    if tokenizer is None:
        raise argument_error(args, "--vocab-size", "is unknown", "give it, or name a --tokenizer-model")
    return tokenizer


def build_for_session(session: Session, args: Namespace) -> Any:
    """Build the tokenizer through its stage, remember it, and return it.

    Raises:
        DataError: a feature's tokenizer does not say how many ids it has.
    """
    tokenizer = session.call("build_tokenizer", args=args)
    if not isinstance(getattr(tokenizer, "vocab_size", None), int):
        raise DataError(
            f"the tokenizer of {_owner(session, args)} has no number vocab_size, from which the model's "
            "vocabulary follows; give it one, the number of ids"
        )
    session.state(BuiltTokenizer).tokenizer = tokenizer
    return tokenizer


def check_vocabulary(session: Session, tokenizer: Any, args: Namespace) -> None:
    """Refuse a tokenizer with more ids than the model's vocabulary.

    Raises:
        ArgumentError: names both numbers.
    """
    if tokenizer.vocab_size > args.padded_vocab_size:
        reason = (
            f"the tokenizer of {_owner(session, args)} has {tokenizer.vocab_size} ids, the model has "
            f"{args.padded_vocab_size}"
        )
        remedy = f"leave it out, or give {tokenizer.vocab_size}"
        raise argument_error(args, "--vocab-size", reason, remedy)


def check_for_datasets(session: Session, tokenizer: Any, args: Namespace) -> None:
    """Refuse a tokenizer that megatron-core's datasets cannot use.

    Raises:
        DataError: names what it lacks.
    """
    missing = [name for name in ("eod", "pad", "unique_identifiers") if not hasattr(tokenizer, name)]
    if missing:
        raise DataError(
            f"the tokenizer of {_owner(session, args)} has no {', '.join(missing)}, which megatron-core's "
            "datasets read; add them, or bring datasets of your own (slot data-source)"
        )


def _owner(session: Session, args: Namespace) -> str:
    replaced = [name for name in session.implementations("build_tokenizer") if name in session.plan.names]
    return (
        ", ".join(replaced)
        or args.tokenizer_model
        or args.vocab_file
        or args.tokenizer_type
        or f"--vocab-size {args.vocab_size}"
    )
