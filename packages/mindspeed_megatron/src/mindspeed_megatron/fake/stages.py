"""Shapes that pipeline stages tell each other, in a world where nobody tells anything.

megatron-core's stages exchange them where the tensors between stages are not the usual ones. What arrives is
what the stage ``boundary_schema`` describes, unless data decides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from mindspeed_core.feature import Patch
from mindspeed_megatron.fake.tensors import AnsweringMode

Function = Callable[..., Any]


def told_shapes(mode: AnsweringMode, shape: Callable[[], Sequence[int] | None]) -> Patch:
    """Return the patch under which an exchange of shapes ends with the one that is known.

    Args:
        mode: passes messages on.
        shape: returns the shape of what crosses from stage to stage; None where data decides.
    """

    def wrap(original: Function) -> Function:
        @functools.wraps(original)
        def communicate_shapes(self: Any, *args: Any, **named: Any) -> Any:
            known = shape()
            # Stages of predictions alone hand on several hidden states.
            if known is None or getattr(self.config, "mtp_standalone", False):
                return original(self, *args, **named)
            with mode.receiving(known):
                return original(self, *args, **named)

        return communicate_shapes

    return Patch(
        target="megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate_shapes",
        new=wrap,
        kind="wrap",
        reason="no other stage tells this one a shape",
    )
