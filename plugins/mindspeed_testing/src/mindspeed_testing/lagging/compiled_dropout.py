"""Dropout as ``torch.compile`` draws it: other masks than those of eager dropout.

Under a dispatch mode torch.compile runs functions eagerly, but for modes that let it compile and then see
nothing of what the function does. A step that another mode follows drops other values than one that nobody
follows. On a CPU nothing is compiled; here megatron-core's compiled dropout draws from numbers of its own,
out of sight of modes that let it, and eagerly where one of somebody else does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any
from zlib import crc32

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from mindspeed_core.feature import Patch
from mindspeed_testing.lagging.device import LaggingDevice


def compiled_dropout(device: LaggingDevice) -> Patch:
    """Return the patch of megatron-core's fused dropout.

    Args:
        device: whose own mode is no observer.
    """

    def around(eager: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(eager)
        def bias_dropout_add(x_with_bias: Any, residual: torch.Tensor, prob: float) -> torch.Tensor:
            modes = [mode for mode in _get_current_dispatch_mode_stack() if mode is not device]
            observed = not all(map(_lets_compile, modes))
            if observed or not device.running or not prob:
                result: torch.Tensor = eager(x_with_bias, residual, prob)
                return result
            before = torch.get_rng_state()
            with torch.no_grad(), _disable_current_modes():
                # As eager dropout draws its mask.
                torch.empty_like(x_with_bias[0]).bernoulli_(1 - prob)
            # Compiled code moves the generator on by as much, and draws by a seed of the graph's own.
            behind = torch.get_rng_state()
            # `torch.manual_seed` would note a stack for each accelerator that this machine lacks.
            torch.default_generator.manual_seed(crc32(before.numpy().tobytes()))
            try:
                with _out_of_sight(device) if modes else nullcontext():
                    drawn: torch.Tensor = eager(x_with_bias, residual, prob)
            finally:
                torch.set_rng_state(behind)
            return drawn

        return bias_dropout_add

    return Patch(
        target="megatron.core.fusions.fused_bias_dropout:bias_dropout_add_fused_train",
        new=around,
        kind="wrap",
        reason="compiled dropout draws other masks than eager dropout",
        required=False,
    )


def _lets_compile(mode: TorchDispatchMode) -> bool:
    asked: Callable[[], bool] | None = getattr(mode, "ignore_compile_internals", None)
    return asked is not None and asked()


@contextmanager
def _out_of_sight(device: LaggingDevice) -> Iterator[None]:
    """Let the device alone see operations."""
    with _disable_current_modes(), device:
        yield
