"""An operator: one definition, and the implementations that compute it on each kind of device.

Dispatch is a dictionary look-up in plain Python, about a microsecond, and transparent to ``torch.compile``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


class Operator:
    """A function of tensors with one implementation per device type.

    Attributes:
        name: as other packages and messages call it.
        reference: the definition, in differentiable torch operations; runs on every device.
        paths: the fast implementation by ``torch.device`` type, with the reference's signature.
    """

    def __init__(
        self,
        name: str,
        reference: Callable[..., torch.Tensor],
        paths: Mapping[str, Callable[..., torch.Tensor]],
    ) -> None:
        """Put an operator together.

        Args:
            name: its name.
            reference: its definition.
            paths: fast implementations by device type.
        """
        self.name = name
        self.reference = reference
        self.paths = dict(paths)
        self._forced: Callable[..., torch.Tensor] | None = None
        self.__doc__ = reference.__doc__

    def __call__(self, tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """Compute the operator where ``tensor`` is."""
        chosen = self._forced or self.paths.get(tensor.device.type, self.reference)
        return chosen(tensor, *args, **options)

    @contextmanager
    def forced(self, path: str) -> Iterator[None]:
        """Use one implementation on every device inside the context.

        Args:
            path: ``"reference"``, or the device type whose implementation is wanted.

        Raises:
            ValueError: there is no such implementation.
        """
        if path != "reference" and path not in self.paths:
            raise ValueError(f"{self.name} has no path {path!r}; it has reference, {', '.join(self.paths)}")
        previous = self._forced
        self._forced = self.reference if path == "reference" else self.paths[path]
        try:
            yield
        finally:
            self._forced = previous

    def __repr__(self) -> str:
        """Name and devices."""
        return f"Operator({self.name!r}, paths={sorted(self.paths)})"
