"""The generator of dropout on CPU, kept from what draws from another generator on a device.

With a device, data loaders draw the seeds of their workers from the CPU's generator and dropout draws from
the device's. On CPU the two are one, and every loader that starts would change the dropout of the next step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class DropoutGenerator:
    """The generator's state around the loaders of one training.

    Attributes:
        shared: the device's generator is the CPU's; nothing is kept otherwise.
    """

    def __init__(self) -> None:
        """Keep nothing yet."""
        self.shared = False
        self._before_loaders: Any = None

    def keep(self) -> None:
        """Remember the state before loaders are made, until the first micro-batch."""
        if self.shared and self._before_loaders is None:
            import torch

            self._before_loaders = torch.get_rng_state()

    def put_back(self) -> None:
        """Go on from the state before loaders were made; once, before anything of the training draws."""
        if self._before_loaders is not None:
            import torch

            torch.set_rng_state(self._before_loaders)
            self._before_loaders = None

    def undisturbed_by(self, samples: Any) -> Any:
        """Return an iterator over the same samples, from which reading leaves the generator as it was."""
        if not self.shared:
            return samples
        self.put_back()
        return samples if samples is None else _Undisturbed(samples)


class _Undisturbed:
    """An iterator that puts the generator back after each sample; a loader that starts again draws a seed."""

    def __init__(self, samples: Iterator[Any]) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        import torch

        state = torch.get_rng_state()
        try:
            return next(self._samples)
        finally:
            torch.set_rng_state(state)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._samples, name)
