"""One rank in a process of its own: the user's command, stopped behind its first step.

Nothing is written and nobody is called while it runs: an audit hook refuses files opened for writing and
sockets, whatever asks for them.
"""

from __future__ import annotations

import json
import os
import resource
import runpy
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mindspeed_megatron.brought_training import is_brought
from mindspeed_tune.launch_command import MODULE, TRAIN

DELIVERED, EXPLAINED, FAILED = "record", "explained", "failed"


def run_rank(job: Mapping[str, Any], deliver: Callable[[str], None]) -> None:
    """Run a rank and deliver one JSON object: its record, or what went wrong. Does not return.

    A record comes with the modules that were imported for it.

    Args:
        job: ``rank``, ``world_size``, ``per_node``, ``platform``, ``command`` (a
            `LaunchCommand` as a mapping), ``options`` (of the probe) and ``skew``.
        deliver: takes the text.
    """
    outcome: dict[str, Any] = {"kind": FAILED, "text": "the command ended before its first training step"}
    before = {*sys.modules}
    try:
        _run(
            job,
            lambda record: _end(
                deliver, {"kind": DELIVERED, "record": record.as_json(), "imported": _imported(job, before)}
            ),
        )
    except SystemExit as stop:
        if stop.code not in (None, 0):
            outcome["text"] = f"the command ended with status {stop.code} before its first training step"
            # A host that has told an error ends the program with it.
            if stop.__context__ is not None and (told := _explained(stop.__context__))["kind"] == EXPLAINED:
                outcome = told
    except BaseException as error:
        outcome = _explained(error)
    _end(deliver, outcome)


def _imported(job: Mapping[str, Any], before: Collection[str]) -> list[str]:
    """Return what a training program imported of packages that were there before, in order.

    A script may import what changes the process, and any program may import modules of the user's.
    """
    if job["command"]["kind"] != TRAIN:
        return []
    return [name for name in sys.modules if name not in before and name.partition(".")[0] in before]


def _end(deliver: Callable[[str], None], outcome: dict[str, Any]) -> None:
    deliver(json.dumps(outcome))
    sys.stdout.flush()
    sys.stderr.flush()
    # Nothing that a training does at its end belongs to a plan.
    os._exit(0)


def _run(job: Mapping[str, Any], deliver: Callable[[Any], None]) -> None:
    from mindspeed_tune.probe import Probe, ProbeOptions

    command = Namespace(**job["command"])
    _set_place(job, command.environment)
    probe = Probe(ProbeOptions(**job["options"]), lambda record: deliver(_with_cost(record)))
    _plan_on(job["platform"], probe, job.get("skew"))
    _refuse_traces()
    if command.kind == TRAIN:
        _train(command.arguments)
        return
    arguments = list(command.arguments)
    if command.kind == MODULE:
        sys.argv = [command.target, *arguments]
        _adapt(probe)
        runpy.run_module(command.target, run_name="__main__", alter_sys=True)
        return
    sys.argv = [command.target, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(command.target)))
    _adapt(probe)
    runpy.run_path(command.target, run_name="__main__")


def _train(arguments: list[str]) -> None:
    from mindspeed_core.activation import prepare
    from mindspeed_core.discovery.entry_points import load_object
    from mindspeed_core.discovery.host import DEFAULT_HOST

    session = prepare(list(arguments), host=DEFAULT_HOST)
    with session:
        load_object(session.host.train)(session)


def _adapt(probe: Any) -> None:
    """Let a Megatron-LM script run through the adaptor, whether it imports it or not."""
    training = find_spec("megatron.training")
    if training is None:
        return
    try:
        adaptor = import_module("mindspeed_core.megatron_adaptor")
    except ImportError:
        if not any(map(is_brought, map(Path, training.submodule_search_locations or ()))):
            raise
        # A script that does not use what megatron-core brings does not need what that imports.
        return
    # The host asks who is there before it chooses what to intercept.
    adaptor.install(extra_plugins=(probe,))


def _set_place(job: Mapping[str, Any], given: Mapping[str, str]) -> None:
    per_node = job["per_node"]
    os.environ.update(given)
    # The interpreter that runs the command is there already.
    sys.path[:0] = filter(None, given.get("PYTHONPATH", "").split(os.pathsep))
    os.environ.update(
        RANK=str(job["rank"]),
        WORLD_SIZE=str(job["world_size"]),
        LOCAL_RANK=str(job["rank"] % per_node),
        LOCAL_WORLD_SIZE=str(min(per_node, job["world_size"])),
        MASTER_ADDR=given.get("MASTER_ADDR", "127.0.0.1"),
        MASTER_PORT=given.get("MASTER_PORT", "29500"),
    )


def _plan_on(platform: str, probe: Any, skew: float | None) -> None:
    """Let every session of this process be a dry run that the probe watches, whatever its flags say."""
    from mindspeed_core.feature import Patch
    from mindspeed_core.runtime.patches import PatchLedger
    from mindspeed_core.session import Session

    def choosing(original: Callable[..., Any]) -> Callable[..., Any]:
        def choose_platform(requested: str, registry: Any) -> tuple[str, str]:
            found: tuple[str, str] = original(platform, registry)
            return found

        return choose_platform

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(self: Session, plan: Any, args: Any, **options: Any) -> None:
            given = tuple(options.pop("extra_plugins", ()))
            extra = given if probe in given else (*given, probe)
            if skew is not None:
                args.plan_skew = skew
            original(self, plan, args, extra_plugins=extra, **options)

        return __init__

    reason = "a plan runs the command unchanged"
    PatchLedger().apply(
        [
            Patch("mindspeed_core.platforms.selection:choose_platform", choosing, reason, kind="wrap"),
            Patch("mindspeed_core.session:Session.__init__", watched, reason, kind="wrap"),
        ],
        owner="plan",
    )


def _refuse_traces() -> None:
    """Refuse what would leave a trace: files opened for writing, sockets to anywhere."""
    sys.dont_write_bytecode = True

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if (
                writes
                and isinstance(path, (str, bytes))
                and os.fsdecode(path) not in (os.devnull, "/dev/tty")
            ):
                raise PermissionError(f"a plan writes no files: {os.fsdecode(path)}")
        elif event in ("socket.bind", "socket.connect"):
            raise PermissionError("a plan opens no sockets")
        elif event in ("os.mkdir", "os.rename", "os.remove", "shutil.rmtree"):
            raise PermissionError(f"a plan changes no files: {arguments[0]}")

    sys.addaudithook(audit)


def _with_cost(record: Any) -> Any:
    from mindspeed_core.platforms.process_memory import peak_resident_bytes

    used = resource.getrusage(resource.RUSAGE_SELF)
    cost = {
        **record.cost,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        # That of `getrusage` begins with what the parent had.
        "peak_bytes": peak_resident_bytes(),
    }
    return replace(record, cost=cost)


def _explained(error: BaseException) -> dict[str, Any]:
    from mindspeed_core.terminal.errors import EXPLAINED as EXPLAINED_ERRORS
    from mindspeed_core.terminal.errors import describe

    if isinstance(error, EXPLAINED_ERRORS):
        return {"kind": EXPLAINED, "text": describe(error)}
    told = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    return {"kind": FAILED, "text": reason, "traceback": told}
