"""Start workers: as forks of this process with the heavy imports done once, or as interpreters of their own.

A fork costs milliseconds instead of the import of torch and megatron-core per worker, also at every restart.
It is only taken where no device runtime can have been started by an import.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from time import strftime

from mindspeed_core.discovery.host import DEFAULT_HOST, HostDeclaration
from mindspeed_core.errors import ArgumentError
from mindspeed_core.platforms.selection import choose_platform
from mindspeed_core.registry import Registry
from mindspeed_megatron.launch import worker
from mindspeed_train.launch import last_save
from mindspeed_train.launch.supervisor import FORWARDED, Supervisor, WorkerSetup
from mindspeed_train.output import settle_output

_MOST_WORKERS = 1024
PRELOAD = (
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.datasets.gpt_dataset",
)
"""Imported before the first fork, with the modules of the host's stages and of its training."""


class LaunchArgumentError(ArgumentError):
    """Flag about processes that cannot work, told from the command line alone."""

    exit_status = 2


def requested_launch(arguments: Sequence[str]) -> argparse.Namespace | None:
    """Return the launch that a command line asks for; None to train in this very process.

    Raises:
        LaunchArgumentError: workers are asked for by two launchers, or their number cannot be started.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--nproc", type=int)
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--platform", default="auto")
    parser.add_argument("--run-dir")
    try:
        found, _ = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        flag = str(error.argument_name)
        words = list(arguments)
        behind = words[words.index(flag) + 1 :][:1] if flag in words else []
        # argparse takes a word with a dash for a flag of its own.
        value = behind[0] if behind and behind[0].startswith("-") else None
        remedy = f"write one value behind {flag}, with = between them where it begins with a dash"
        raise LaunchArgumentError(flag, value, str(error.message), remedy) from error
    if worker.supervised():
        return None
    if found.nproc is None:
        if found.max_restarts:
            raise LaunchArgumentError(
                "--max-restarts",
                found.max_restarts,
                "only workers that were started here can be restarted",
                "add --nproc; torchrun has its own --max-restarts",
            )
        return None
    if found.nproc < 1:
        raise LaunchArgumentError("--nproc", found.nproc, "must be at least 1", "drop it for one process")
    if found.nproc > _MOST_WORKERS:
        reason = f"is more than {_MOST_WORKERS} processes on one machine"
        raise LaunchArgumentError("--nproc", found.nproc, reason, f"use at most {_MOST_WORKERS}")
    if found.max_restarts < 0:
        raise LaunchArgumentError(
            "--max-restarts", found.max_restarts, "must not be negative", "use 0 or more"
        )
    if "RANK" in os.environ:
        raise LaunchArgumentError(
            "--nproc", found.nproc, "another launcher started this process already (RANK is set)", "drop it"
        )
    return found


def launch(
    arguments: Sequence[str], options: argparse.Namespace, main: Callable[[Sequence[str]], int]
) -> int:
    """Run the program in workers, supervise them and return the exit status.

    A fork calls ``main``; an interpreter of its own runs ``mindspeed_core.train``.
    """
    arguments = list(arguments)
    if options.run_dir is None:
        # Restarted workers go on in the same folder.
        options.run_dir = os.path.join("runs", strftime("%Y%m%d-%H%M%S"))
        arguments += ["--run-dir", options.run_dir]
    return supervise(arguments, options, main)


def supervise(
    arguments: Sequence[str], options: argparse.Namespace, main: Callable[[Sequence[str]], int]
) -> int:
    """Run the program in workers with this very command line; see `launch`."""
    if options.nproc > 1:
        # As torchrun does: workers share the cores.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    registry = Registry.discover()
    # A process that started a device's runtime cannot be forked.
    forks = "cpu" in registry.platform(choose_platform(options.platform, registry)[0]).kinds()
    if forks:
        _import_all(registry.host(DEFAULT_HOST))

    def start(setup: WorkerSetup) -> int:
        return _fork(setup, lambda: main(arguments)) if forks else _spawn(setup, arguments)

    return Supervisor(
        start, options.nproc, options.max_restarts, lambda: last_save.last_words(options.run_dir, arguments)
    ).run()


def _import_all(host: HostDeclaration) -> None:
    for path in (*PRELOAD, *host.stages, host.train):
        import_module(path.partition(":")[0])
    # Pages of what is imported stay shared as long as nobody writes into them.
    gc.collect()
    gc.freeze()


def _fork(setup: WorkerSetup, program: Callable[[], int]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    # A signal to the fork waits until it is no copy of the supervisor any more.
    held = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        return pid
    status = 1
    try:
        _become_a_worker(held)
        for descriptor in setup.close:
            os.close(descriptor)
        os.environ.update(setup.environment)
        status = program()
        atexit._run_exitfuncs()
        settle_output()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        # Never back into the frames of the parent.
        os._exit(status)


def _spawn(setup: WorkerSetup, arguments: Sequence[str]) -> int:
    held = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "mindspeed_core.train", *arguments],
            env={**os.environ, **setup.environment},
            pass_fds=setup.keep,
            preexec_fn=lambda: _become_a_worker(held),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
    # The supervisor waits for the process itself.
    process.returncode = 0
    return process.pid


def _become_a_worker(held: set[int | signal.Signals]) -> None:
    """Lead a process group, with a new program's answers to signals; those that came meanwhile arrive now."""
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    for number in (*FORWARDED, signal.SIGCHLD):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, held)
