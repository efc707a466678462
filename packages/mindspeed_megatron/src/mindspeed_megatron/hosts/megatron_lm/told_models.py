"""Facts of a micro-batch that a model chunk is told beside the script, which has no place for them."""

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
_OF_THE_HOST = "_mindspeed_told"
_DESCRIPTION = "packed_seq_params"


def tell_model(now: PretrainCall, model_chunk: Any) -> None:
    """Let a chunk be called with what features know of the micro-batch that its script has fetched.

    That is: which positions are no tokens and, in scripts of core_v0.18 and later, a feature's description.

    Args:
        now: the call of ``pretrain``.
        model_chunk: wrapped or not; changed once.
    """
    chunk = unwrap(model_chunk)
    for name in (_FORWARD, _PLAN):
        original = getattr(chunk, name, None)
        if original is not None and not hasattr(original, _OF_THE_HOST):
            now.session.instances.set(NAME, chunk, name, _told(now, chunk, name, original))


def _told(now: PretrainCall, chunk: Any, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **named: Any) -> Any:
        known = padding_options(now.run, now.batch, chunk, planned=name == _PLAN) if now.tells_padding else {}
        described = now.batch.packed_seq_params
        if now.describes_beside and described is not now.described_by_script and _DESCRIPTION in named:
            named[_DESCRIPTION] = described
        return original(*args, **{**known, **named})

    setattr(call, _OF_THE_HOST, True)
    return call
