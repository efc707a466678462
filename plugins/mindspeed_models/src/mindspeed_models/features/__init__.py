"""The declarations of mindspeed-models; importing them loads neither torch nor megatron."""

from __future__ import annotations

from mindspeed_core.feature import HookApi

DECLARATIONS = (HookApi("1.3"),)

__all__ = ["DECLARATIONS"]
