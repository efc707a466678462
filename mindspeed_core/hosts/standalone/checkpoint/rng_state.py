"""Random states of a rank as plain tensors and numbers, and putting them back at the right moment.

Building data iterators draws random numbers, on the cpu platform from the very generator that dropout uses:
restoring at load time is not enough, the loop restores again right before the first step.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core import tensor_parallel

if TYPE_CHECKING:
    from mindspeed_core.platforms.platform import Platform
    from mindspeed_core.run import Run


@dataclass
class LoadedRng:
    """The random states of this rank that a checkpoint held, until `restore` takes them."""

    state: dict[str, Any] | None = None


def capture(platform: Platform) -> dict[str, Any]:
    """Return the states of Python's, NumPy's, torch's, the device's and the tensor-parallel generators.

    Under Megatron-LM's keys and in forms that its loader takes, but made of tensors, lists, tuples, numbers
    and strings only, so that no class has to be unpickled to read them.
    """
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": (
            str(name),
            [int(key) for key in np.asarray(keys)],
            int(position),
            int(has_gauss),
            float(cached),
        ),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": platform.rng_state().cpu(),
        "rng_tracker_states": {
            key: _as_tensor(value)
            for key, value in tensor_parallel.get_cuda_rng_tracker().get_states().items()
        },
    }


def apply(state: dict[str, Any], platform: Platform) -> None:
    """Set every generator to a captured state, of this program or of Megatron-LM."""
    version, words, gauss = state["random_rng_state"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["np_rng_state"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch_rng_state"])
    if platform.device_type != "cpu":
        platform.set_rng_state(state["cuda_rng_state"])
    tracker = tensor_parallel.get_cuda_rng_tracker()
    current = tracker.get_states()
    # A tracker of registered generators (CUDA graphs) is set in place, a plain one takes a new dictionary.
    states = {key: value.clone() for key, value in state["rng_tracker_states"].items()}
    for key, value in states.items():
        generator = current.get(key)
        if isinstance(generator, torch.Generator):
            generator.set_state(value)
            states[key] = generator
    tracker.set_states(states)


def restore(run: Run) -> None:
    """Set the random states that the checkpoint held, if any; to be called right before the first step."""
    loaded = run.session.state(LoadedRng)
    if loaded.state is not None:
        apply(loaded.state, run.session.platform)
        loaded.state = None


def _as_tensor(state: Any) -> torch.Tensor:
    return (state.get_state() if isinstance(state, torch.Generator) else state).cpu()
