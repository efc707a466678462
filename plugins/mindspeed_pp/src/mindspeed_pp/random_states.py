"""States of the random number generators that a model draws from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker


def _states(platform: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    tracker = get_cuda_rng_tracker()
    copies = {
        name: state.clone() if isinstance(state, torch.Tensor) else state
        for name, state in tracker.get_states().items()
    }
    return torch.get_rng_state(), platform.rng_state(), copies


def _set(platform: Any, states: tuple[torch.Tensor, torch.Tensor, dict[str, Any]]) -> None:
    host, device, tracked = states
    torch.set_rng_state(host)
    platform.set_rng_state(device)
    get_cuda_rng_tracker().set_states(tracked)


def kept_random_state(platform: Any) -> Callable[[], AbstractContextManager[None]]:
    """Return a context that draws again what is drawn from here on, and then goes on as if it had not."""
    kept = _states(platform)

    @contextmanager
    def again() -> Iterator[None]:
        now = _states(platform)
        _set(platform, kept)
        try:
            yield
        finally:
            _set(platform, now)

    return again
