"""The function that megatron-core's buckets reduce gradients with, given back when a session closes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.distributed import param_and_grad_buffer

if TYPE_CHECKING:
    from mindspeed_core.session import Session

_NAME = "dist_reduce_scatter_func"


@dataclass
class _Kept:
    done: bool = False


def keep_reduction(session: Session) -> None:
    """Give the function back when the session closes, whatever buckets put in its place until then.

    megatron-core sets it for the whole process, and never back. It is one of the names of torch's own
    reduce-scatter: a patch would replace that under all of its names, and other parts of a model call some.
    """
    state = session.state(_Kept)
    if state.done:
        return
    state.done = True
    original = getattr(param_and_grad_buffer, _NAME)

    def give_back() -> None:
        setattr(param_and_grad_buffer, _NAME, original)
        state.done = False

    # Before the platform closes, whose instruments may hold the function too.
    session.at_close(give_back)
