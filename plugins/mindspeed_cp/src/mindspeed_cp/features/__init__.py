"""What mindspeed-cp declares; importing it loads neither torch nor megatron."""

from __future__ import annotations

from mindspeed_cp.features.context_parallel import ContextParallel

DECLARATIONS = (ContextParallel,)

__all__ = ["DECLARATIONS", "ContextParallel"]
