"""Processes of a world: forked from a server that has imported torch and megatron-core."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, ModuleType
from typing import Any
from unittest import mock

PRELOAD = f"{__package__}.preload"
"""The module that the fork server imports before its first child."""
FURTHER_IMPORTS = "MINDSPEED_WORLD_IMPORTS"
"""Names further modules for it, divided by commas."""
_start_lock = threading.Lock()


def fork_server_process(function: Callable[..., None], *args: Any) -> Any:
    """Start a module-level function in a process of its own, with the heavy imports behind it.

    Returns:
        The running ``multiprocessing`` process; it may have children and ends on its own.
    """
    with fork_server() as context:
        process = context.Process(target=function, args=args)
        process.start()
    return process


_servers: dict[frozenset[tuple[str, str]], Any] = {}
"""Fork servers with an environment of their own."""


@contextlib.contextmanager
def fork_server(environment: Mapping[str, str] = MappingProxyType({})) -> Iterator[Any]:
    """Yield the context of a fork server with the heavy imports done, to start processes in.

    The server has one compute thread, since children inherit its OpenMP pool. The program's main module is
    hidden from multiprocessing: children find functions by name, and import it only when it is asked for.

    Args:
        environment: variables of a server of its own; empty for the one that all others share.
    """
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOAD])
    changed = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **environment}
    with _start_lock:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        before = {name: os.environ.get(name) for name in changed}
        os.environ.update(changed)
        try:
            connect: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
            if environment:
                server = _servers.setdefault(frozenset(environment.items()), forkserver.ForkServer())
                server.set_forkserver_preload([PRELOAD])
                server.ensure_running()
                connect = mock.patch.object(
                    forkserver, "connect_to_new_process", server.connect_to_new_process
                )
            else:
                forkserver.ensure_running()
            _restore_environment(before)
            with connect:
                yield context
        finally:
            _restore_environment(before)
            sys.modules["__main__"] = main


def _restore_environment(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def adopt_parent_environment(setup: Mapping[str, Any]) -> int:
    """Set the ``environment``, import ``path``, ``directory`` and ``output`` file that the parent chose.

    Returns:
        The descriptor of the file.
    """
    os.environ.clear()
    os.environ.update(setup["environment"])
    sys.path[:] = setup["path"]
    os.chdir(setup["directory"])
    output = os.open(setup["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0, closefd=False), write_through=True)
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", 0, closefd=False), write_through=True)
    return output
