"""Process groups that features create, found by name and destroyed with their session."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import SessionError

if TYPE_CHECKING:
    import torch.distributed as dist


class Groups:
    """Named process groups of one session.

    Every rank creates the same groups in the same order: `create` takes the rank lists of all groups, also
    those this rank is not in, since ``torch.distributed.new_group`` is collective.
    """

    def __init__(self) -> None:
        """Start without groups."""
        self._mine: dict[str, list[dist.ProcessGroup]] = {}
        self._ranks: dict[str, list[list[int]]] = {}

    def create(
        self,
        name: str,
        ranks_per_group: Sequence[Sequence[int]],
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
        options: Any = None,
    ) -> dist.ProcessGroup | None:
        """Create one group per rank list and keep those this rank belongs to.

        Args:
            name: for instance ``cp.ring``; taken once per session.
            ranks_per_group: global ranks of every group. A rank may be in several (directed p2p pairs).
            backend: another backend than the default group's.
            timeout: another timeout than the default group's.
            options: the backend's own options.

        Returns:
            This rank's (first) group, or None when it is in none.

        Raises:
            SessionError: the name is taken.
        """
        import torch.distributed as dist

        if name in self._ranks:
            raise SessionError(f"process group {name!r} was already created in this session")
        mine: list[dist.ProcessGroup] = []
        rank = dist.get_rank()
        for ranks in ranks_per_group:
            group = dist.new_group(
                list(ranks), timeout=timeout, backend=backend, pg_options=options, group_desc=name
            )
            if rank in ranks:
                mine.append(group)
        self._mine[name] = mine
        self._ranks[name] = [list(ranks) for ranks in ranks_per_group]
        return mine[0] if mine else None

    def split(
        self, name: str, group: dist.ProcessGroup, parts: Sequence[Sequence[int]], **options: Any
    ) -> dist.ProcessGroup | None:
        """Create sub-groups inside every group of a kind (of every tensor-parallel group, say).

        Each rank knows its own group only; the rank lists of the others are exchanged here, so that all ranks
        create all sub-groups in one order. Collective over all ranks.

        Args:
            name: of the new groups, as in `create`.
            group: this rank's group of the kind that is split.
            parts: positions within a group, ``[[0, 1], [2, 3]]``; the same on every rank.
            options: as in `create`.

        Returns:
            This rank's (first) sub-group, or None when it is in none.
        """
        import torch.distributed as dist

        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, dist.get_process_group_ranks(group))
        whole = sorted({tuple(ranks) for ranks in everyones})
        lists = [[ranks[position] for position in part] for ranks in whole for part in parts]
        return self.create(name, lists, **options)

    def __getitem__(self, name: str) -> dist.ProcessGroup:
        """This rank's group of that name; the first where it is in several (`all` gives them all)."""
        groups = self.all(name)
        if not groups:
            raise KeyError(f"this rank is in no group {name!r}; its groups are {self._ranks[name]}")
        return groups[0]

    def all(self, name: str) -> list[dist.ProcessGroup]:
        """Every group of that name this rank is in, in creation order."""
        if name not in self._mine:
            known = ", ".join(sorted(self._mine)) or "none"
            raise KeyError(f"no process group {name!r} was created in this session (known: {known})")
        return self._mine[name]

    def ranks(self, name: str) -> list[list[int]]:
        """The rank lists a name was created with."""
        return self._ranks[name]

    def __contains__(self, name: object) -> bool:
        """Whether the name was created."""
        return name in self._ranks

    def __iter__(self) -> Iterator[str]:
        """The created names, in order."""
        return iter(self._ranks)

    def destroy(self) -> None:
        """Destroy every group; safe when the backend is already down."""
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            for groups in reversed(list(self._mine.values())):
                for group in reversed(groups):
                    if group is not dist.group.WORLD:
                        dist.destroy_process_group(group)
        self._mine.clear()
        self._ranks.clear()
