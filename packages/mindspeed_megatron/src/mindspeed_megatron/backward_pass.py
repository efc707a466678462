"""The backward pass of one micro-batch, whichever arguments megatron-core's function takes."""

from __future__ import annotations

from functools import lru_cache
from inspect import signature
from typing import Any

from megatron.core.pipeline_parallel import schedules
from torch import Tensor


def backward_pass(
    inputs: Tensor | None, outputs: Tensor, gradients: Tensor | None, config: Any
) -> Tensor | None:
    """Run backward through the outputs of a pipeline stage.

    Args:
        inputs: what the stage received, ``[s, b, h]``; None on the first stage.
        outputs: what it sent, or the loss.
        gradients: of the outputs; None behind the loss.
        config: megatron-core's configuration of the model.

    Returns:
        The gradient of the inputs.
    """
    # megatron-core 0.17 dropped the kind of the model, which was read no more.
    kind = {"model_type": None} if _takes_kind() else {}
    found: Tensor | None = schedules.backward_step(inputs, outputs, gradients, config=config, **kind)
    return found


@lru_cache(maxsize=1)
def _takes_kind() -> bool:
    return "model_type" in signature(schedules.backward_step).parameters
