"""States of the random number generators that a model draws from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed


def _states(platform: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    return torch.get_rng_state(), platform.rng_state(), get_cuda_rng_tracker().get_states()


def _set(platform: Any, states: tuple[torch.Tensor, torch.Tensor, dict[str, Any]]) -> None:
    host, device, tracked = states
    torch.set_rng_state(host)
    platform.set_rng_state(device)
    # The tracker puts new tensors into the dictionary that it is given, and changes none.
    get_cuda_rng_tracker().set_states(dict(tracked))


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


@contextmanager
def seeded(platform: Any, parts: tuple[int, ...]) -> Iterator[None]:
    """Draw from generators that numbers seed, and go on afterwards as if nothing had been drawn.

    Args:
        platform: of the session.
        parts: numbers that together make the seed.
    """
    now = _states(platform)
    seed = int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") >> 1
    try:
        # Tensor-parallel ranks differ where megatron-core lets them.
        model_parallel_cuda_manual_seed(seed)
        torch.manual_seed(seed)
        yield
    finally:
        _set(platform, now)
