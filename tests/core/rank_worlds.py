"""Four processes that compare themselves over a store; run in a process of its own by the tests of the check.

torch is imported once and the ranks are forked, so that a world costs a fraction of a second. Gives, per
scenario, the exit status of each rank and what was printed.
"""

import os
import socket
import sys
import tempfile
from datetime import timedelta
from types import SimpleNamespace

import torch.distributed as dist

from mindspeed_core.discovery.host import HostDeclaration
from mindspeed_core.errors import LostPeerError
from mindspeed_core.feature import Feature, Flag
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.resolve import resolve
from mindspeed_megatron.rank_check import check_ranks, facts_agree, rank_facts

WORLD = 4


class Ring(Feature):
    name, family, summary = "ring", "demo", "a demonstration"
    flags = (Flag("--ring"), Flag("--cache", type=str, per_rank=True))


def no_flags():
    return ()


HOST = HostDeclaration("empty", "a host", flags=f"{__name__}:no_flags", stages=())


def session(version="1.0", **arguments):
    registry = Registry.of_distributions({"demo-plugin": (version, (Ring,)), "demo-host": ("1", (HOST,))})
    args = SimpleNamespace(**{"ring": True, "cache": None, "rank": 0, "lr": 0.1, **arguments})
    return SimpleNamespace(
        args=args,
        registry=registry,
        plan=resolve(registry, args, platform="cpu", host="empty"),
        platform=SimpleNamespace(distributions=("torch_npu",), dry_run=False),
        host=HOST,
    )


def equal(rank):
    return session(rank=rank, cache=f"/node{rank}")


def other_version(rank):
    return session("1.1" if rank == 2 else "1.0")


def other_version_on_rank_zero(rank):
    return session("1.1" if rank == 0 else "1.0")


def other_arguments(rank):
    return session(lr=0.2 if rank in (1, 3) else 0.1, ring=rank != 3)


SESSIONS = {f.__name__: f for f in (equal, other_version, other_version_on_rank_zero, other_arguments)}


def compare(store, rank, scenario):
    facts = rank_facts(SESSIONS[scenario](rank))
    same = facts_agree(dist.PrefixStore(scenario, store), rank, WORLD, facts, timedelta(seconds=20))
    if same:
        leave_together(store, rank)
    return 0 if same else 1


def leave_together(store, rank):
    """Rank 0 holds the store of these worlds: it goes last, as a training that goes on would."""
    if rank and store.add("leaving", 1) == WORLD - 1:
        store.set("all left", "1")
    if not rank:
        store.get("all left")


def silent(store, rank, scenario):
    if rank == 3:
        return 7
    facts = {"plan": "one"}
    same = facts_agree(dist.PrefixStore(scenario, store), rank, WORLD, facts, timedelta(seconds=5))
    return 0 if same else 1


def without_rank_zero(store, rank, scenario):
    """Rank 0 compares nothing; one of the others waits for it, and goes by itself."""
    if rank in (2, 3):
        return 0
    if rank == 0:
        store.get("told")
        return 0
    try:
        facts_agree(dist.PrefixStore(scenario, store), rank, WORLD, {"plan": "one"}, timedelta(seconds=0.5))
    except LostPeerError as error:
        print(error, file=sys.stderr, flush=True)
        store.set("told", "1")
        return 5
    return 0


def whole(store, rank, scenario):
    """The check as a host calls it, twice, over the default store of an initialised process group."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    info = SimpleNamespace(rank=rank, world_size=WORLD)
    check_ranks(session(), info)
    skipped = other_version(rank)
    skipped.args.no_cross_rank_check = True
    check_ranks(skipped, info)
    check_ranks(other_version(rank), info)
    return 0


def run(scenario, function):
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with tempfile.TemporaryFile() as printed:
        children = [fork(scenario, function, rank, port, listener, printed) for rank in range(WORLD)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        listener.close()
        printed.seek(0)
        return {"codes": codes, "printed": printed.read().decode()}


def fork(scenario, function, rank, port, listener, printed):
    child = os.fork()
    if child:
        return child
    code = 99
    try:
        os.dup2(printed.fileno(), 2)
        master = {"is_master": True, "master_listen_fd": listener.detach()} if rank == 0 else {}
        store = dist.TCPStore(
            "127.0.0.1", port, WORLD, timeout=timedelta(seconds=30), wait_for_workers=False, **master
        )
        code = function(store, rank, scenario)
    except SystemExit as stop:
        code = stop.code
    except BaseException as error:
        print(f"rank {rank}: {error!r}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def everything():
    results = {name: run(name, compare) for name in SESSIONS}
    others = {function.__name__: run(function.__name__, function) for function in (silent, without_rank_zero)}
    return {**results, **others, "whole": run("whole", whole)}
