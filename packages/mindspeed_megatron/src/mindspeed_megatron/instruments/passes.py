"""The pass in which an operator runs: forward, backward, or a forward that is run again during backward.

Told by the functions that are running. Neither the mode of autograd tells it (the forward of a
``torch.autograd.Function``, which megatron-core's linear layers are, records nothing, also when it is run
again), nor names of files and functions alone (``Function.apply`` runs a recomputed forward,
``BackwardCFunction.apply`` a backward, both in one file): code objects do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from types import CodeType
from typing import Any, TypeVar

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils import checkpoint

FORWARD, BACKWARD, RECOMPUTED = "forward", "backward", "recomputed"

Function = TypeVar("Function", bound=Callable[..., Any])

_recomputing: set[CodeType] = set()


def recomputes(function: Function) -> Function:
    """Mark a function that runs a forward again, so that what it computes counts as recomputed."""
    _recomputing.add(function.__code__)
    return function


def current_pass() -> str:
    """Return `FORWARD`, `BACKWARD` or `RECOMPUTED` for the operator that is running.

    The innermost function that tells decides: torch's and megatron-core's checkpoints, functions marked by
    `recomputes`, and the entries of autograd's engine. Walks all frames, some microseconds.
    """
    again, backward = _markers()
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code in again or code in _recomputing:
            return RECOMPUTED
        if code in backward:
            return BACKWARD
        if code.co_filename == checkpoint.__file__ and code.co_name in ("unpack_hook", "recompute_fn"):
            # Functions inside of others, made anew for each checkpoint.
            return RECOMPUTED
        frame = frame.f_back
    # A kernel of torch's own, called by a thread of the engine.
    return FORWARD if torch._C._current_graph_task_id() == -1 else BACKWARD


@lru_cache(maxsize=1)
def _markers() -> tuple[frozenset[CodeType], frozenset[CodeType]]:
    from megatron.core.tensor_parallel import random
    from torch.autograd import graph

    again = (
        checkpoint.CheckpointFunction.backward,
        random.CheckpointFunction.backward,
        random.CheckpointWithoutOutput._recompute,
    )
    backward = (BackwardCFunction.apply, graph._engine_run_backward)
    return frozenset(one.__code__ for one in again), frozenset(one.__code__ for one in backward)
