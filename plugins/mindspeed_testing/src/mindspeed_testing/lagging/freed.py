"""Memory that went back to the allocator while another stream used it."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_testing.lagging.findings import Finding, Frames, calling_frames
from mindspeed_testing.lagging.memory import Access, StorageHistory
from mindspeed_testing.lagging.streams import LaggingStream


class FreedMemory:
    """Accesses that were not over when their memory went back, until its owner takes memory again."""

    def __init__(self) -> None:
        """Start with none."""
        self._accesses: list[tuple[LaggingStream, Access, Frames, str]] = []

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self._accesses)

    def add(self, history: StorageHistory, rule: str) -> None:
        """Take note of memory that goes back.

        Args:
            history: of its storage.
            rule: under which a finding is reported.
        """
        owner = history.owner
        if owner is None:
            return
        used = [
            one
            for one in history.in_use()
            # Process groups keep what they work on until it was waited for.
            if rule == "emptied while in use" or not one.stream.name.startswith("communication")
        ]
        used = [one for one in used if not one.precedes(owner)]
        if used:
            frames = calling_frames()
            self._accesses += [(owner, one, frames, rule) for one in used]

    def taken(self, stream: LaggingStream) -> Iterator[tuple[Finding, Access]]:
        """Give memory away again that came back on a stream; yield each access that has not finished."""
        freed, self._accesses = self._accesses, []
        for owner, access, frames, rule in freed:
            if owner is not stream:
                self._accesses.append((owner, access, frames, rule))
            elif not access.precedes(owner):
                text = (
                    f"memory of {owner.name} is given away again while {access.operation} on "
                    f"{access.stream.name} has not finished with it"
                )
                yield Finding(rule, text, frames, access.frames), access

    def clear(self) -> None:
        """Forget all of them."""
        self._accesses.clear()
