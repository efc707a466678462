"""The losses of a step by name, read from the device when somebody looks at them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from mindspeed_core.platforms.platform import Platform


class Losses(Mapping[str, float]):
    """Numbers by name that the device may still be working on; whoever reads one waits for it.

    ``losses | {"name": value}`` is a changed copy, as with a dictionary, and reads nothing yet.

    Attributes:
        counts: over how many tokens of all ranks each loss is a mean, by name, where that is known.
    """

    def __init__(
        self, read: Callable[[], Mapping[str, float]], counts: Mapping[str, float] | None = None
    ) -> None:
        """Keep how to read the numbers.

        Args:
            read: returns them all; called once, when the first is looked at.
            counts: see `Losses`.
        """
        self._read = read
        self._numbers: Mapping[str, float] | None = None
        self.counts: Mapping[str, float] = {} if counts is None else counts

    def _found(self) -> Mapping[str, float]:
        if self._numbers is None:
            self._numbers = self._read()
        return self._numbers

    def __getitem__(self, name: str) -> float:
        return self._found()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found())

    def __len__(self) -> int:
        return len(self._found())

    def __or__(self, further: Mapping[str, float]) -> Losses:
        return Losses(lambda: {**self, **further}, self.counts)

    def __ror__(self, first: Mapping[str, float]) -> Losses:
        return Losses(lambda: {**first, **self}, self.counts)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> Any:
        # What travels to another process are the numbers.
        return dict, (dict(self),)


class LateCopy:
    """A copy of a tensor on the host that may still be under way; calling it gives its values."""

    def __init__(self, host: torch.Tensor, copied: Any = None) -> None:
        """Keep where the copy goes.

        Args:
            host: memory of the host.
            copied: the event behind the copy, None where ``host`` holds the values already.
        """
        self._host, self._copied = host, copied

    def arrived(self) -> bool:
        """Return whether calling it waits for nothing."""
        return self._copied is None or bool(self._copied.query())

    def __call__(self) -> Any:
        """Wait for the copy alone, not for work that is launched later.

        Returns:
            A list of numbers, of a scalar a number.
        """
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.tolist()


def copied_later(tensor: torch.Tensor, platform: Platform) -> LateCopy:
    """Start to copy a tensor to the host, which goes on meanwhile."""
    if tensor.device.type == "cpu" and platform.memory_is_host:
        return LateCopy(tensor)
    host = platform.pinned_empty(tensor.shape, tensor.dtype)
    host.copy_(tensor, non_blocking=True)
    copied = platform.event()
    copied.record()
    return LateCopy(host, copied)
