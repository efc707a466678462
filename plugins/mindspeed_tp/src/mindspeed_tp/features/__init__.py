"""The declarations of mindspeed-tp; importing them loads neither torch nor megatron."""

from __future__ import annotations

from mindspeed_core.feature import HookApi
from mindspeed_tp.features.coc import ChunkedProducts, FusedProducts
from mindspeed_tp.features.core import PlannedLinears

DECLARATIONS = (HookApi("1.1"), PlannedLinears, ChunkedProducts, FusedProducts)

__all__ = ["DECLARATIONS", "ChunkedProducts", "FusedProducts", "PlannedLinears"]
