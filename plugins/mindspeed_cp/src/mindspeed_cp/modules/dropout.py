"""Dropout of hidden states that differs between ranks of context parallelism.

megatron-core seeds these ranks alike, for their weights are the same: what each drops of its own tokens would
be the same places. Here every rank but the first begins each step with random states of its own, a function
of seed, step and rank. They need no place in a checkpoint, and building weights stays untouched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from megatron.core import tensor_parallel

if TYPE_CHECKING:
    from mindspeed_core.platforms.platform import Platform
    from mindspeed_core.run import Run

DEFAULT = ""
"""The device's own generator; the others have the names of megatron-core's tracker."""


def digests(platform: Platform) -> dict[str, bytes]:
    """Return digests of this rank's freshly seeded generators; they differ by seed and by model shard."""
    states = {DEFAULT: platform.rng_state(), **tensor_parallel.get_cuda_rng_tracker().get_states()}
    return {name: hashlib.sha256(_bytes(state)).digest() for name, state in states.items()}


def own_states(run: Run, origin: Mapping[str, bytes]) -> None:
    """Give this rank the random states of the coming step; the first rank keeps what it has.

    ``origin`` is the result of `digests` after seeding, ``run.iteration`` the number of finished steps.
    """
    rank = run.pg.cp.rank()
    if rank == 0:
        return
    platform, tracker = run.session.platform, tensor_parallel.get_cuda_rng_tracker()
    states = dict(tracker.get_states())
    for name, digest in origin.items():
        generator = torch.Generator(device=run.dist.device).manual_seed(_seed(digest, run.iteration, rank))
        state = generator.get_state()
        if name == DEFAULT:
            platform.set_rng_state(state)
        elif isinstance(states.get(name), torch.Generator):
            # Registered with graphs: the generator itself has to stay.
            states[name].set_state(state)
        else:
            states[name] = state
    tracker.set_states(states)


def _seed(digest: bytes, iteration: int, rank: int) -> int:
    mixed = hashlib.sha256(digest + iteration.to_bytes(8, "big") + rank.to_bytes(8, "big")).digest()
    return int.from_bytes(mixed[:8], "big") >> 1


def _bytes(state: torch.Tensor | torch.Generator) -> bytes:
    tensor = state.get_state() if isinstance(state, torch.Generator) else state
    return tensor.cpu().numpy().tobytes()
