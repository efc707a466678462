"""The tokenizer: interception and default."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from mindspeed_core.errors import DataError
from mindspeed_core.feature import hookimpl
from mindspeed_megatron.hosts.megatron_lm import pretrain_call
from mindspeed_megatron.hosts.megatron_lm.pretrain_call import PretrainCall, intercepts
from mindspeed_megatron.uneven_partition import leaves_partition


@intercepts()
def around_build_tokenizer(
    now: PretrainCall, original: Callable[..., Any], args: Any, *rest: Any, **named: Any
) -> Any:
    """Intercept ``build_tokenizer``: the model's vocabulary follows from what features return."""
    session = now.session
    given = getattr(args, "padded_vocab_size", None)
    with now.calling("build_tokenizer", lambda: original(args, *rest, **named)) as call:
        tokenizer = session.call("build_tokenizer", args=session.args)
    if tokenizer is call.result:
        return tokenizer
    if given is None:
        multiple = args.make_vocab_size_divisible_by
        if not leaves_partition(session):
            multiple *= args.tensor_model_parallel_size
        args.padded_vocab_size = -(-tokenizer.vocab_size // multiple) * multiple
    elif tokenizer.vocab_size > given:
        features = [name for name in session.implementations("build_tokenizer") if name in session.plan.names]
        raise DataError(
            f"the tokenizer of {', '.join(features)} has {tokenizer.vocab_size} ids, the model has {given}; "
            "leave --padded-vocab-size out"
        )
    return tokenizer


@hookimpl(trylast=True)
def build_tokenizer(args: Namespace) -> Any:
    """Build Megatron-LM's tokenizer."""
    return pretrain_call.current().pending("build_tokenizer")()
