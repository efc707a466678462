"""Positions that are no tokens, handed to a model beside the script, which knows nothing of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mindspeed_megatron.hosts.megatron_lm import NAME
from mindspeed_megatron.padding import padding_options
from mindspeed_megatron.unwrap import unwrap

if TYPE_CHECKING:
    from mindspeed_megatron.hosts.megatron_lm.pretrain_call import PretrainCall

_FORWARD, _PLAN = "forward", "build_schedule_plan"
_OF_THE_HOST = "_mindspeed_padding"


def tell_padding(now: PretrainCall, model_chunk: Any) -> None:
    """Let a chunk be called with the padding of the micro-batch that its script has fetched.

    Args:
        now: the call of ``pretrain``.
        model_chunk: wrapped or not; changed once.
    """
    chunk = unwrap(model_chunk)
    for name in (_FORWARD, _PLAN):
        original = getattr(chunk, name, None)
        if original is not None and not hasattr(original, _OF_THE_HOST):
            now.session.instances.set(NAME, chunk, name, _with_padding(now, chunk, name, original))


def _with_padding(
    now: PretrainCall, chunk: Any, name: str, original: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **named: Any) -> Any:
        known = padding_options(now.run, now.batch, chunk, planned=name == _PLAN)
        return original(*args, **{**known, **named})

    setattr(call, _OF_THE_HOST, True)
    return call
