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

from mindspeed_core.errors import CheckpointError
from mindspeed_train.checkpoint.fields import Fields
from mindspeed_train.checkpoint.opened_files import ANOTHER

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


def check(states: Any, where: str) -> None:
    """Check random states as a checkpoint holds them: a list with one for each data-parallel rank, or one.

    Generators take some of it without a look: numpy's position in its words may lie behind their end.

    Raises:
        CheckpointError: names file and field.
    """
    if not isinstance(states, list) or not states:
        raise CheckpointError(
            f"{where}: is no list of random states; the file is damaged or forged; {ANOTHER}"
        )
    for state in states:
        fields = Fields(where, state)
        python = fields.value("random_rng_state")
        if (
            not isinstance(python, (list, tuple))
            or len(python) != 3
            or python[0] != 3
            or not _are_words(python[1], 625)
            or not 0 <= python[1][-1] <= 624
            or not (python[2] is None or isinstance(python[2], float))
        ):
            fields.refuse("random_rng_state", python, "what Python's random.getstate returns")
        numpy = fields.value("np_rng_state")
        if (
            not isinstance(numpy, (list, tuple))
            or len(numpy) != 5
            or numpy[0] != "MT19937"
            or not _are_words(numpy[1], 624)
            or type(numpy[2]) is not int
            or not 0 <= numpy[2] <= 624
            or numpy[3] not in (0, 1)
            or not isinstance(numpy[4], float)
        ):
            fields.refuse("np_rng_state", numpy, "what numpy's random.get_state returns")
        for name in ("torch_rng_state", "cuda_rng_state"):
            _check_bytes(fields, name)
        tracker = fields.child("rng_tracker_states")
        for name in tracker.content:
            _check_bytes(tracker, name)


def _are_words(values: Any, count: int) -> bool:
    if isinstance(values, np.ndarray):
        return values.shape == (count,) and values.dtype.kind in "ui" and bool((values >= 0).all())
    if not isinstance(values, (list, tuple)) or len(values) != count:
        return False
    return all(type(value) is int and 0 <= value < 1 << 32 for value in values)


def _check_bytes(fields: Fields, name: str) -> None:
    value = fields.value(name)
    if not isinstance(value, torch.Tensor) or value.dtype != torch.uint8 or not 8 <= value.numel() <= 1 << 20:
        fields.refuse(name, value, "the state of a generator, a tensor of bytes")


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
