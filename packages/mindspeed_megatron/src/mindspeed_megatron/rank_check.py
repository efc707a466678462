"""The check that all ranks run the same thing: plan, versions, sources of every plugin, and arguments.

Ranks exchange what they run through the store, not through a collective: a rank that died, or that has
another backend, would hang a collective. They compare digests first and send details only when digests
differ, so that the usual case costs one short message per rank.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mindspeed_core.discovery.installed import installed_version, package_places
from mindspeed_core.errors import LostPeerError

if TYPE_CHECKING:
    from mindspeed_core.registry import Registry
    from mindspeed_core.run import DistInfo
    from mindspeed_core.session import Session

TIMEOUT = timedelta(minutes=10)
"""As of ``--distributed-timeout-minutes``."""
_LAST_WORDS = timedelta(seconds=30)
_LONGEST_PAUSE = 0.25

_PER_RANK = frozenset({"rank", "local_rank", "node_rank", "group_rank", "local_world_size", "master_addr"})
_SOURCES = frozenset({".py", ".json", ".cpp", ".cu", ".h"})
_ABSENT = "absent"
_ARGUMENT = "argument "
_ROWS = 40
_CELL = 48
_round = itertools.count()


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that the check needs."""

    def set(self, key: str, value: str, /) -> None:
        """Publish a value."""

    def get(self, key: str, /) -> bytes:
        """Return a value."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether keys have values."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter and return its value."""


@dataclass(frozen=True)
class Difference:
    """One item (``version mindspeed-cp``) in which a rank differs: its value ``here``, and on most ranks."""

    rank: int
    item: str
    here: str
    most: str


def check_ranks(session: Session, dist_info: DistInfo) -> None:
    """Stop every rank when ranks do not run the same plan, versions, sources or arguments.

    Called by the host right after ``torch.distributed`` is up. Rank 0 prints a table of who differs before
    any rank exits. Does nothing in a world of one, or with ``--no-cross-rank-check``.

    Raises:
        SystemExit: ranks differ; on every rank, with exit status 1.
    """
    if not ranks_agree(session, dist_info):
        import torch.distributed as dist

        dist.destroy_process_group()
        raise SystemExit(1)


def ranks_agree(session: Session, dist_info: DistInfo, *, with_arguments: bool = True) -> bool:
    """Compare what the ranks of the default world run, through its store; collective over all ranks.

    A world of one, a dry run and ``--no-cross-rank-check`` need no comparison. Without ``with_arguments``
    only plan, versions and sources are compared.

    Returns:
        Whether all ranks agree, the same on every rank. When not, rank 0 has printed a table to stderr.
    """
    alone = dist_info.world_size < 2 or session.platform.dry_run
    if alone or getattr(session.args, "no_cross_rank_check", False):
        return True
    import torch.distributed as dist

    # Sessions that follow each other share the default store: each check gets keys of its own.
    store: Any = dist.PrefixStore(
        f"mindspeed/ranks/{next(_round)}", dist.distributed_c10d._get_default_store()
    )
    facts = rank_facts(session)
    if not with_arguments:
        facts = {item: value for item, value in facts.items() if not item.startswith(_ARGUMENT)}
    minutes = getattr(session.args, "distributed_timeout_minutes", None)
    timeout = TIMEOUT if minutes is None else timedelta(minutes=minutes)
    return facts_agree(store, dist_info.rank, dist_info.world_size, facts, timeout)


def rank_facts(session: Session) -> dict[str, str]:
    """Collect what this rank runs, item by item: plan, versions, content of plugins, arguments."""
    from mindspeed_core.flags.flag_set import flag_set

    versions = {
        name: installed_version(name) or _ABSENT
        for name in ("torch", "megatron-core", *session.platform.distributions)
    }
    per_rank = flag_set(session.registry, session.host.name).per_rank()
    return {
        "plan": session.plan.digest,
        "active features": " ".join(session.plan.names),
        "python": platform.python_version(),
        **{f"version {name}": v for name, v in {**versions, **session.registry.distributions()}.items()},
        **content_facts(session.registry),
        **argument_facts(vars(session.args), per_rank),
    }


def content_facts(registry: Registry) -> dict[str, str]:
    """Hash the source files of each distribution that has an entry point of ours.

    Versions do not tell that a file was edited on one node; this does.
    """
    return {
        f"source files {dist}": content_hash(packages)
        for dist, packages in registry.packages().items()
        if packages
    }


def content_hash(packages: Iterable[str]) -> str:
    """Hash names and bytes of the source files of import packages: SHA-256, cut to 16 digits."""
    digest = hashlib.sha256()
    for package in sorted(packages):
        for root in package_places(package):
            for name, file in sorted(_source_files(str(root))):
                stat = os.stat(file)
                digest.update(f"{package}/{name}\0".encode())
                digest.update(_file_digest(file, stat.st_size, stat.st_mtime_ns))
    return digest.hexdigest()[:16]


def _source_files(root: str) -> Iterator[tuple[str, str]]:
    """Yield name and path of the source files of a package, or of its only file."""
    if os.path.isfile(root):
        yield os.path.basename(root), root
    for folder, _, names in os.walk(root):
        for name in names:
            if os.path.splitext(name)[1] in _SOURCES:
                path = os.path.join(folder, name)
                yield os.path.relpath(path, root).replace(os.sep, "/"), path


@functools.cache
def _file_digest(path: str, size: int, changed: int) -> bytes:
    """Return the digest of a file's bytes; sessions that follow each other read a file once."""
    return hashlib.sha256(Path(path).read_bytes()).digest()


def argument_facts(arguments: Mapping[str, Any], per_rank: Iterable[str] = ()) -> dict[str, str]:
    """Return the arguments on which ranks must agree, as text; the values of ``per_rank`` may differ."""
    left_out = _PER_RANK | set(per_rank)
    return {
        f"{_ARGUMENT}{name}": json.dumps(value, sort_keys=True)
        for name, value in sorted(arguments.items())
        if name not in left_out and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def facts_agree(
    store: Store, rank: int, world_size: int, facts: Mapping[str, str], timeout: timedelta = TIMEOUT
) -> bool:
    """Compare what the ranks run; collective over all ranks of the store.

    Args:
        store: with a prefix of its own.
        rank: this rank, of ``world_size``.
        world_size: all ranks.
        facts: what this rank runs.
        timeout: how long to wait for a rank.

    Returns:
        Whether all ranks agree, the same on every rank. When not, rank 0 has printed the table.

    Raises:
        LostPeerError: rank 0 does not answer or has ended; on the other ranks.
    """
    digest = hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()
    store.set(f"digest/{rank}", digest)
    if rank == 0:
        return _judge(store, world_size, facts, timeout)
    try:
        return _answer(store, rank, facts, timeout)
    except RuntimeError as error:
        raise LostPeerError(
            f"rank {rank} of {world_size}: rank 0 ended while the ranks compared what they run; look at the "
            "first error in its output"
        ) from error


def _answer(store: Store, rank: int, facts: Mapping[str, str], timeout: timedelta) -> bool:
    # Rank 0 may wait the whole timeout for a rank that never comes before it decides.
    given = _wait(store, "verdict", timeout * 2)
    if given is None:
        raise LostPeerError(
            f"rank {rank} waited {2 * timeout.total_seconds():g} s for rank 0 to compare what the ranks run "
            "(twice --distributed-timeout-minutes); rank 0 ended, hangs, or has not opened such a session: "
            "look at its output. Where it does something else on purpose, pass --no-cross-rank-check"
        )
    verdict = json.loads(given)
    if verdict["agree"]:
        return True
    if rank in verdict["send"]:
        store.set(f"facts/{rank}", json.dumps(dict(facts)))
    _wait(store, "printed", timeout)
    # Rank 0 may hold the store itself: it stays until everybody has read that the table is printed.
    if store.add("left", 1) == verdict["present"] - 1:
        store.set("empty", "1")
    return False


def _wait(store: Store, key: str, timeout: timedelta) -> str | None:
    """Return a value once it is there, or None when the time is up.

    The store's own wait prints c10d's text when it gives up.
    """
    deadline, pause = time.monotonic() + timeout.total_seconds(), 0.001
    while not store.check([key]):
        if time.monotonic() >= deadline:
            return None
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_PAUSE)
    return store.get(key).decode()


def _judge(store: Store, world_size: int, facts: Mapping[str, str], timeout: timedelta) -> bool:
    digests: dict[int, str] = {}
    silent: list[int] = []
    # All ranks have the same time, however many do not come.
    deadline = time.monotonic() + timeout.total_seconds()
    for rank in range(world_size):
        left = timedelta(seconds=max(0.0, deadline - time.monotonic()))
        digest = _wait(store, f"digest/{rank}", left)
        if digest is None:
            silent.append(rank)
        else:
            digests[rank] = digest
    counts = Counter(digests.values())
    if len(counts) == 1 and not silent:
        store.set("verdict", json.dumps({"agree": True}))
        return True
    # A tie is decided by the lowest rank, so that the table is the same in every repetition.
    most = max(counts, key=lambda d: (counts[d], -min(r for r, own in digests.items() if own == d)))
    typical = min(rank for rank, digest in digests.items() if digest == most)
    differing = [rank for rank, digest in digests.items() if digest != most][:_ROWS]
    send = sorted({typical, *differing})
    store.set("verdict", json.dumps({"agree": False, "send": send, "present": len(digests)}))
    details = {0: dict(facts)}
    for rank in send:
        if rank:
            details[rank] = json.loads(_wait(store, f"facts/{rank}", _LAST_WORDS) or "{}")
    found = differences({rank: details[rank] for rank in send}, typical)
    waited = f"within {timeout.total_seconds():g} s (--distributed-timeout-minutes)"
    print(format_table(found, world_size, silent, counts[most], waited), file=sys.stderr, flush=True)
    store.set("printed", "1")
    if len(digests) > 1:
        _wait(store, "empty", _LAST_WORDS)
    return False


def differences(facts: Mapping[int, Mapping[str, str]], typical: int) -> list[Difference]:
    """Return every item in which a rank differs from the typical rank, by rank and item."""
    most = facts[typical]
    return [
        Difference(rank, item, own.get(item, _ABSENT), most.get(item, _ABSENT))
        for rank, own in sorted(facts.items())
        for item in sorted({*own, *most})
        if own.get(item, _ABSENT) != most.get(item, _ABSENT)
    ]


def format_table(
    differences: Sequence[Difference], world_size: int, silent: Sequence[int], same: int, waited: str = ""
) -> str:
    """Format the message of rank 0: the ranks that differ, in what, and those that did not answer in time."""
    lines = [f"E-RANKS: the {world_size} ranks do not run the same thing ({same} of them agree)"]
    if silent:
        listed = ", ".join(map(str, silent[:_ROWS]))
        lines.append(
            f"  no answer from rank {listed} {waited}: look at the first error in its output; where it runs "
            "something else on purpose, pass --no-cross-rank-check"
        )
    if differences:
        rows = [("rank", "item", "this rank", "most ranks")]
        rows += [(str(d.rank), d.item, _cut(d.here), _cut(d.most)) for d in differences[:_ROWS]]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths)]
            lines.append("  " + " | ".join((*cells, row[3])))
        if len(differences) > _ROWS:
            lines.append(f"  and {len(differences) - _ROWS} more differences")
    lines.append("  -> install the same versions and pass the same flags on every node")
    return "\n".join(lines)


def _cut(text: str) -> str:
    return text if len(text) <= _CELL else text[: _CELL - 3] + "..."
