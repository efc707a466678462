"""Repair of megatron-core's checkpoint that drops its output and computes it again in backward.

``CheckpointWithoutOutput`` takes its default ``fp8=False`` for "fp8 is on", which without TransformerEngine
ends in a missing name, and it empties an output even where its consumer needs no gradient and nothing would
fill it again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch


def repaired(original: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor that makes checkpoints which work without TransformerEngine.

    Args:
        original: ``CheckpointWithoutOutput.__init__``.
    """
    without_fp8 = find_spec("transformer_engine") is None

    def __init__(self: Any, fp8: Any = False) -> None:
        original(self, fp8=None if without_fp8 and fp8 is False else fp8)
        self.__class__ = _keeping(self.__class__)

    return __init__


@cache
def _keeping(base: Hashable) -> Any:
    class Keeping(base):  # type: ignore[valid-type, misc]
        def discard_output_and_register_recompute(self, hook_tensor: torch.Tensor) -> None:
            """Drop the output, unless backward never reaches its consumer."""
            if hook_tensor.requires_grad:
                super().discard_output_and_register_recompute(hook_tensor)

    Keeping.__name__ = Keeping.__qualname__ = "CheckpointWithoutOutput"
    return Keeping
