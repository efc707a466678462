"""Repair of megatron-core's checkpoint that drops its output and computes it again in backward.

``CheckpointWithoutOutput`` takes its default ``fp8=False`` for "fp8 is on", which without TransformerEngine
ends in a missing name, and it empties an output even where its consumer needs no gradient and nothing would
fill it again. It tells nobody that it will: here it announces its outputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import torch

from mindspeed_megatron.broken_packages import why_unusable
from mindspeed_megatron.dropped_storages import announce_drop

_made: weakref.WeakSet[Any] = weakref.WeakSet()


def forget_checkpoints() -> None:
    """Let go of what checkpoints keep that backward never reached.

    A layer holds its checkpoint, which holds an output with its graph, which holds the layer's parameters: a
    circle through torch's own objects, that Python does not find.
    """
    for checkpoint in list(_made):
        checkpoint.run_function = checkpoint.rng_states = checkpoint.ctx = checkpoint.outputs = None
    _made.clear()


def repaired(original: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor that makes checkpoints which work without TransformerEngine.

    Args:
        original: ``CheckpointWithoutOutput.__init__``.
    """
    without_fp8 = bool(why_unusable("transformer_engine"))

    def __init__(self: Any, fp8: Any = False) -> None:
        original(self, fp8=None if without_fp8 and fp8 is False else fp8)
        self.__class__ = _keeping(self.__class__)
        _made.add(self)

    return __init__


@cache
def _keeping(base: Hashable) -> Any:
    class Keeping(base):  # type: ignore[valid-type, misc]
        def checkpoint(self, run_function: Callable[..., Any], *args: Any) -> Any:
            """Compute the output, and announce that its storage will be emptied."""
            outputs = super().checkpoint(run_function, *args)
            found = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
            announce_drop(one for one in found if isinstance(one, torch.Tensor))
            return outputs

        def discard_output_and_register_recompute(self, hook_tensor: torch.Tensor) -> None:
            """Drop the output, unless backward never reaches its consumer."""
            if hook_tensor.requires_grad:
                super().discard_output_and_register_recompute(hook_tensor)

    Keeping.__name__ = Keeping.__qualname__ = "CheckpointWithoutOutput"
    return Keeping
