"""Random numbers of the value device: the host's, in the order of the device's own generators.

A generator of the device is a seed and an offset that every draw moves on. What a draw at an offset gives is
what the host's generator of that seed gives at the same place in its own sequence, so that a program draws
the same numbers on both devices, and the same ones again where it sets an earlier state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter


class HostRandom:
    """Draws for the generators of the device, by seed and offset."""

    def __init__(self) -> None:
        """Know no generator yet."""
        self._states: dict[tuple[int, int], Tensor] = {}

    def draw(self, generator: torch.Generator, run: Callable[[], Any]) -> Any:
        """Return what ``run`` returns, with the host's default generator at the place of ``generator``.

        Args:
            generator: one of the device; its offset moves on by the elements drawn, in blocks of four.
            run: draws on the host.
        """
        place = generator.initial_seed(), generator.get_offset()
        host = torch.default_generator
        before = host.get_state()
        try:
            if place in self._states:
                host.set_state(self._states[place])
            else:
                host.manual_seed(place[0] + place[1])
            result = run()
            drawn = max(
                (value.numel() for value in tree_iter(result) if isinstance(value, Tensor)), default=0
            )
            generator.set_offset(place[1] + 4 * max(1, -(-drawn // 4)))
            self._states[place[0], generator.get_offset()] = host.get_state()
        finally:
            host.set_state(before)
        return result


def draws(func: Any) -> bool:
    """Return whether an operation takes random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def generator_of(args: Any) -> torch.Generator:
    """Return the generator that a call names, or else the device's own."""
    given = next((value for value in tree_iter(args) if isinstance(value, torch.Generator)), None)
    if given is not None:
        return given
    return torch.npu.default_generators[torch.npu.current_device()]  # type: ignore[attr-defined]
