"""Conversions to and from half precision at both ends of a model whose stages live elsewhere.

megatron-core's wrapper of a chunk in half precision converts inputs on the first chunk of the first pipeline
rank, and outputs to float32 on the last chunk of the last one. Where the last stage is on another rank, it
would send float32 between stages, and leave the output of the model in half precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.core.transformer.module import Float16Module, float16_to_fp32, fp32_to_float16

from mindspeed_pp.placement import Placement

if TYPE_CHECKING:
    from mindspeed_core.session import Session

OWNER = "pp-engine"


def convert_at_ends(session: Session, models: Sequence[Any], placement: Placement, rank: int) -> None:
    """Let the wrappers of chunks convert where the model begins and ends; once for each.

    Args:
        session: takes the changes back when it closes.
        models: this rank's chunks, with all their wrappers.
        placement: of stages.
        rank: this pipeline rank.
    """
    if placement.is_loop:
        return
    for model, stage in zip(models, placement.held[rank]):
        half = _half(model)
        if half is not None and "forward" not in vars(half):
            first, last = placement.is_first(stage), placement.is_last(stage)
            changed = partial(_forward, half.module, half.float16_convertor, first, last)
            session.instances.set(OWNER, half, "forward", changed)


def _half(model: Any) -> Any:
    while model is not None and not isinstance(model, Float16Module):
        model = getattr(model, "module", None)
    return model


def _forward(
    module: Callable[..., Any],
    convert: Callable[[Any], Any],
    first: bool,
    last: bool,
    *inputs: Any,
    fp32_output: bool = True,
    **named: Any,
) -> Any:
    outputs = module(*(fp32_to_float16(inputs, convert) if first else inputs), **named)
    return float16_to_fp32(outputs) if last and fp32_output else outputs
