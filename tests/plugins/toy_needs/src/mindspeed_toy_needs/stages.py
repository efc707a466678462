"""The stages that this package publishes; other packages implement and wrap them like the core's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspeed_core.hooks import hookspec

if TYPE_CHECKING:
    import torch

    from mindspeed_core.run import Batch, Run
    from mindspeed_core.session import Session

__all__ = ["toy_route", "toy_token_weights"]


@hookspec
def toy_route(session: Session, pp_size: int, chunks: int) -> tuple[tuple[int, int], ...] | Any:
    """Return the pipeline rank and the local chunk of every global stage, in order."""


@hookspec
def toy_token_weights(session: Session, run: Run, batch: Batch) -> torch.Tensor | Any:
    """Return how much the loss of each token counts, ``[b, s]`` float32."""
