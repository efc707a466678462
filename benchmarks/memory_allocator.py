"""Reserve memory for a planned training as torch's caching allocator does, with and without growing segments.

Part f of `memory.py`. The sequence of allocations is that of a dry run, and the allocator is the model of
torch's that plans are made with (`mindspeed_tune.allocator`). What is reserved and not allocated is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from memory_optimizer import on_first_rank

from mindspeed_core.activation import activate
from mindspeed_core.feature import hookimpl
from mindspeed_train import loop
from mindspeed_tune.allocator import estimate

MODEL = "LLaMA2-7B"
_MIB = 2**20
_FULL = ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "16")
CASES = {"plain": (), "half of the layers again": _FULL, "swapped attention": ("--swap-attention",)}


class Recording:
    """The sequence of allocations of a run.

    Attributes:
        events: key and bytes, 0 bytes for a release, and whether a pool of what lasts serves it.
    """

    def __init__(self) -> None:
        """Start with nothing; what is built first lasts."""
        self.events: list[tuple[int, int, bool]] = []
        self.lasting = True
        self._pool_of: dict[int, bool] = {}
        self._updates = 0

    def taken(self, key: int, size: int) -> None:
        """Record an allocation."""
        if size:
            self._pool_of[key] = self.lasting
            self.events.append((key, size, self.lasting))

    def released(self, key: int) -> None:
        """Record a release."""
        if key in self._pool_of:
            self.events.append((key, 0, self._pool_of.pop(key)))

    @hookimpl(wrapper=True)
    def optimizer_step(self) -> Iterator[None]:
        """Let the first update make what lasts: the optimizer's state."""
        self._updates += 1
        self.lasting = self._updates == 1
        result = yield
        self.lasting = False
        return result  # type: ignore[return-value]


def recorded(line: list[str]) -> list[tuple[int, int, bool]]:
    """Plan two steps of one rank; return what it allocated."""
    recording = Recording()
    with activate(line, host="standalone", extra_plugins=[recording]) as session:
        storage: Any = session.platform.storage
        with storage.watched_by(recording):
            run = loop.setup(session)
            recording.lasting = False
            session.call("start_run", run=run)
            for _ in range(2):
                session.call("train_step", run=run)
                run.iteration += 1
                run.consumed_train_samples += run.args.global_batch_size
        loop.teardown(session)
    return recording.events


def replayed(events: Sequence[tuple[int, int, bool]]) -> dict[str, int]:
    """Return the most bytes that were allocated, and those reserved by each kind of segments."""
    fixed = estimate((key, size) for key, size, _ in events)
    growing = estimate(((key, size) for key, size, _ in events), expandable=True)
    pools = [estimate((key, size) for key, size, lasts in events if lasts is pool) for pool in (True, False)]
    return {
        "allocated": fixed.allocated,
        "fixed": fixed.reserved,
        "growing": growing.reserved,
        "pools": sum(pool.reserved for pool in pools),
    }


def reserved_bytes() -> dict[str, Any]:
    """Compare the kinds of segments, without other features and with some that make many sizes."""
    return {name: replayed(on_first_rank(recorded, MODEL, flags)) for name, flags in CASES.items()}


def show_reserved_bytes(found: dict[str, Any]) -> None:
    """Print the table."""
    print(f"{MODEL}, MiB{'':<14}{'allocated':>11}{'fixed':>17}{'growing':>17}{'pools':>17}")
    for name, row in found.items():
        shown = (
            f"{row[kind] / _MIB:>9,.0f} ({row[kind] / row['allocated'] - 1:+.1%})"
            for kind in ("fixed", "growing", "pools")
        )
        print(f"{name:<28}{row['allocated'] / _MIB:>9,.0f}{''.join(shown)}")
