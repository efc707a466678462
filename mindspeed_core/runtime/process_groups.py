"""Process groups that features create, found by name.

Groups are expensive, and no backend takes a single one back safely while others work. A session that ends for
good destroys its groups together with the world; one that may be followed by another hands them to a pool of
the process, from which the next session with the same ranks and options takes them.

Messages of a step that failed may still be under way in a group: receives that were posted, sends that nobody
took. A later session would pair them with its own. After an unclean end of a session on any rank no group of
that time is used again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import SessionError
from mindspeed_core.runtime.gather import all_gather_values

if TYPE_CHECKING:
    import torch.distributed as dist

Key = tuple[Any, ...]
_UNCLEAN = "mindspeed/unclean-ends"


@dataclass(frozen=True, eq=False)
class _Created:
    """A group, or torch's mark for one this rank is not in, and what it was made with."""

    key: Key
    group: Any


class _Pool:
    """Groups of the current world that no session holds, by ranks and options.

    Every rank asks for the same groups in the same order, also for those it is not in: so either all ranks
    find a group here, or all ranks create it.
    """

    def __init__(self) -> None:
        self._idle: dict[Key, list[_Created]] = {}
        self._world: weakref.ref[Any] = lambda: None  # type: ignore[assignment]
        self._ends: int = 0
        self._others: dict[str, int] = {}

    def take(self, key: Key) -> _Created | None:
        """Return a group with these ranks and options, or None."""
        idle = self._of_this_world().get(key)
        return idle.pop(0) if idle else None

    def take_back(self, created: _Created) -> None:
        """Take this very group out again, for the session that left it here."""
        idle = self._of_this_world().get(created.key, [])
        idle[:] = [other for other in idle if other is not created]

    def put(self, created: _Created) -> None:
        """Keep a group for the next session."""
        self._of_this_world().setdefault(created.key, []).append(created)

    def look(self) -> None:
        """Use no group again of a session of this world that ended uncleanly on any rank since the last look.

        Every session looks when it opens, before its ranks have met: all of them see the same.
        """
        self._of_this_world()
        ends = unclean_ends()
        if ends != self._ends:
            self._ends, self._idle = ends, {}

    def remember(self, name: str) -> None:
        """Remember that groups which are not kept here are of this time."""
        self._of_this_world()
        self._others[name] = self._ends

    def is_spoiled(self, name: str) -> bool:
        """Return whether a session ended uncleanly since `remember`."""
        self._of_this_world()
        return self._others.get(name, self._ends) != self._ends

    def _of_this_world(self) -> dict[Key, list[_Created]]:
        world = current_world()
        if self._world() is not world:
            self._idle, self._others = {}, {}
            self._world = weakref.ref(world)
            self._ends = 0
        return self._idle


_pool = _Pool()


def unclean_ends() -> int:
    """Return how many sessions of this world ended uncleanly, on all ranks together."""
    store = _store()
    return 0 if store is None else int(store.add(_UNCLEAN, 0))


look_for_unclean_ends = _pool.look
remember_groups = _pool.remember
groups_are_spoiled = _pool.is_spoiled


def _store() -> Any:
    """Return the store of the world; None where there is nobody to disagree with."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if dist.get_backend() == "fake":
        return None
    return c10d._get_default_store()


class Groups:
    """Named process groups of one session.

    Every rank creates the same groups in the same order: `create` takes the rank lists of all groups, also
    those this rank is not in, since ``torch.distributed.new_group`` is collective.
    """

    def __init__(self) -> None:
        """Start without groups."""
        self._own: dict[str, list[dist.ProcessGroup]] = {}
        self._ranks: dict[str, list[list[int]]] = {}
        self._held: list[_Created] = []
        self._released_in: weakref.ref[Any] | None = None
        self._rules: list[Callable[[str], Any]] = []

    def choose_options(self, rule: Callable[[str], Any]) -> None:
        """Ask a rule for the backend's options of every group that is created from now on.

        Asked for groups of features, and for megatron-core's where a feature has the patch of
        `mindspeed_megatron.group_options`; call it in `prepare_process`, before any group exists.

        Args:
            rule: from a group's name to options, or None where it has none to give; the first rule that
                gives some is followed. It answers alike on all ranks.
        """
        self._rules.append(rule)

    def options_of(self, name: str) -> Any:
        """Return the options that rules give for a group; None where they give none."""
        return next((options for rule in self._rules if (options := rule(name)) is not None), None)

    def create(
        self,
        name: str,
        ranks_per_group: Sequence[Sequence[int]],
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
        options: Any = None,
        members_only: bool = False,
    ) -> dist.ProcessGroup | None:
        """Create one group per rank list and keep those this rank belongs to.

        A group that an earlier session of this process released is taken instead of a new one.

        Args:
            name: for instance ``cp.ring``; taken once per session.
            ranks_per_group: global ranks of every group. A rank may be in several (directed p2p pairs).
            backend: another backend than the default group's.
            timeout: another timeout than the default group's.
            options: the backend's own options; without them, and on the default backend, those that rules of
                `choose_options` give.
            members_only: a rank takes part in creating the groups it is in and no others; see `created_apart`
                for when that works.

        Returns:
            This rank's (first) group, or None when it is in none.

        Raises:
            SessionError: the name is taken.
        """
        import torch.distributed as dist

        if name in self._ranks:
            raise SessionError(f"process group {name!r} was already created in this session")
        if options is None and backend is None:
            options = self.options_of(name)
        own_groups: list[dist.ProcessGroup] = []
        rank = dist.get_rank()
        for ranks in ranks_per_group:
            if members_only and rank not in ranks:
                continue
            # Ranks outside of a group know of it only where all ranks created it.
            key = (tuple(ranks), backend, timeout, _values(options), members_only)
            created = _pool.take(key)
            if created is None:
                group = dist.new_group(
                    list(ranks),
                    timeout=timeout,
                    backend=backend,
                    pg_options=options,
                    use_local_synchronization=members_only,
                    group_desc=name,
                )
                created = _Created(key, group)
            self._held.append(created)
            if rank in ranks:
                own_groups.append(created.group)
        self._own[name] = own_groups
        self._ranks[name] = [list(ranks) for ranks in ranks_per_group]
        return own_groups[0] if own_groups else None

    def split(
        self, name: str, group: dist.ProcessGroup, parts: Sequence[Sequence[int]], **options: Any
    ) -> dist.ProcessGroup | None:
        """Create sub-groups inside every group of a kind (of every tensor-parallel group, say).

        Each rank knows its own group only; the rank lists of the others are exchanged here, in one collective
        over all ranks. A rank creates the sub-groups that it is in, where that works; else all ranks create
        all of them in one order.

        Args:
            name: of the new groups, as in `create`.
            group: this rank's group of the kind that is split.
            parts: positions within a group, ``[[0, 1], [2, 3]]``; the same on every rank.
            options: as in `create`.

        Returns:
            This rank's (first) sub-group, or None when it is in none.
        """
        import torch.distributed as dist

        everyones = all_gather_values((dist.get_process_group_ranks(group), _memberships()))
        lists = sub_groups((tuple(ranks) for ranks, _ in everyones), parts)
        apart = created_apart(lists, [memberships for _, memberships in everyones])
        return self.create(name, lists, members_only=apart, **options)

    def __getitem__(self, name: str) -> dist.ProcessGroup:
        """Return this rank's group of that name; the first where it is in several (`all` gives them all)."""
        groups = self.all(name)
        if not groups:
            raise KeyError(f"this rank is in no group {name!r}; its groups are {self._ranks[name]}")
        return groups[0]

    def all(self, name: str) -> list[dist.ProcessGroup]:
        """Return every group of that name this rank is in, in creation order."""
        if name not in self._own:
            known = ", ".join(sorted(self._own)) or "none"
            raise KeyError(f"no process group {name!r} was created in this session (known: {known})")
        return self._own[name]

    def ranks(self, name: str) -> list[list[int]]:
        """Return the rank lists a name was created with."""
        return self._ranks[name]

    def __contains__(self, name: object) -> bool:
        """Return whether the name was created."""
        return name in self._ranks

    def __iter__(self) -> Iterator[str]:
        """Return the created names, in order."""
        return iter(self._ranks)

    def destroy(self) -> None:
        """Destroy every group; safe when the backend is already down."""
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            for groups in reversed(list(self._own.values())):
                for group in reversed(groups):
                    if group is not dist.group.WORLD:
                        dist.destroy_process_group(group)
        self.forget()

    def release(self) -> None:
        """Leave the groups to the pool of this process; their names stay known for `reclaim`.

        Modules that hold a group go on using it.
        """
        world = current_world()
        self._released_in = weakref.ref(world) if world is not None else None
        if world is not None:
            for created in self._held:
                _pool.put(created)

    def spoil(self) -> None:
        """Leave the groups alone: what a failed step has sent or posted may still be in them."""
        store = _store()
        if store is not None:
            store.add(_UNCLEAN, 1)
        self._released_in = None

    def reclaim(self) -> bool:
        """Take the released groups again.

        Returns:
            Whether they can be used: the world they belong to is still there. If not, they are forgotten.
        """
        released_in, self._released_in = self._released_in, None
        world = current_world()
        if world is None or released_in is None or released_in() is not world:
            self.forget()
            return False
        for created in self._held:
            _pool.take_back(created)
        return True

    def forget(self) -> None:
        """Drop every group without destroying it: the world it belongs to is gone."""
        self._own.clear()
        self._ranks.clear()
        self._held.clear()


def sub_groups(groups: Iterable[Sequence[int]], parts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the rank lists of all sub-groups, in the order in which they are created.

    Args:
        groups: global ranks of every group that is split, in any order, also several times.
        parts: positions within a group.
    """
    whole = sorted({tuple(ranks) for ranks in groups})
    return [[ranks[position] for position in part] for ranks in whole for part in parts]


def created_apart(lists: Iterable[Sequence[int]], memberships: Sequence[int | None]) -> bool:
    """Return whether the members of each group can create it without the other ranks.

    torch then names a group after its ranks and the number of groups that a member is in already: that number
    must be the same for all of them when their turn comes.

    Args:
        lists: global ranks of every group, in order of creation.
        memberships: number of groups that every rank is in; None where its backend wants all ranks.
    """
    if None in memberships:
        return False
    counted = [count or 0 for count in memberships]
    for ranks in lists:
        if len({counted[rank] for rank in ranks}) > 1:
            return False
        for rank in ranks:
            counted[rank] += 1
    return True


def _memberships() -> int | None:
    """Return the number of groups this rank is in; None where all ranks create groups together."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    # A communicator that belongs to a device is split from the default group's, in which all ranks take part.
    bound = getattr(dist.group.WORLD, "bound_device_id", None) is not None
    return None if bound or dist.get_backend() == "mpi" else len(c10d._world.pg_names)


def current_world() -> Any:
    """Return the current default group of ``torch.distributed``; None without one."""
    import torch.distributed as dist

    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _values(options: Any) -> tuple[tuple[str, str], ...]:
    """Return a backend's options in a form that can be compared."""
    if options is None:
        return ()
    names = (name for name in dir(options) if not name.startswith("_"))
    values = ((name, getattr(options, name, None)) for name in names)
    return tuple((name, repr(value)) for name, value in values if not callable(value))
