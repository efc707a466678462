"""Process that has torch and megatron-core imported, and forks one process for every rank.

Importing them takes longer than running a rank; what else a rank has imported is there for those behind it.
Jobs come as lines of JSON on standard input at any time, outcomes leave as lines on standard output as they
come; what ranks print is kept apart. Nothing is written to disk.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

_TAIL = 4000
_MODULES = (
    "mindspeed_testing.preload",
    "mindspeed_megatron.instruments.storage",
    "mindspeed_megatron.fake.platform",
    "mindspeed_megatron.fake.tensors",
    "torch._dynamo",
    "torch.distributed._meta_registrations",
    "torch.testing._internal.distributed.fake_pg",
    "mindspeed_tune.probe",
    "mindspeed_tune.rank_process",
)


def main(parallel: int) -> int:
    """Serve until standard input ends; ranks that still run then are ended with it.

    Args:
        parallel: ranks at once.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Whatever a rank or an import prints must not be taken for an answer.
    os.dup2(2, 1)
    _import()
    # Ctrl-C reaches the whole terminal: the one who gives the jobs ends this process then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(BrokenPipeError):
        for outcome in _serve(parallel):
            answers.write(json.dumps(outcome) + "\n")
            answers.flush()
    return 0


def _import() -> None:
    from mindspeed_megatron.quiet import quieten

    quieten()
    for name in _MODULES:
        import_module(name)
    gc.collect()
    gc.freeze()


def _import_too(names: Sequence[str]) -> None:
    """Import what a rank had to import; what cannot be imported here is left to those who need it."""
    missing = [name for name in names if name not in sys.modules]
    for name in missing:
        with suppress(Exception):
            import_module(name)
    if missing:
        gc.freeze()


def _serve(parallel: int) -> Iterator[dict[str, Any]]:
    """Yield the outcome of every job as it comes."""
    waiting: list[dict[str, Any]] = []
    children: dict[int, dict[str, Any]] = {}
    imported: list[str] = []
    begun = b""
    watch = selectors.DefaultSelector()
    watch.register(0, selectors.EVENT_READ)
    while True:
        if waiting and imported:
            _import_too(imported)
            imported.clear()
        while waiting and len(children) < parallel:
            job = waiting.pop(0)
            pid, result, output = _fork(job)
            children[pid] = {
                "job": job,
                "open": 2,
                "result": b"",
                "output": b"",
                "until": time.monotonic() + (job.get("limit") or float("inf")),
            }
            watch.register(result, selectors.EVENT_READ, (pid, "result"))
            watch.register(output, selectors.EVENT_READ, (pid, "output"))
        for key, _ in watch.select(_end_late_ones(children)):
            text = os.read(key.fd, 1 << 16)
            if key.data is None:
                if not text:
                    for pid in children:
                        os.kill(pid, signal.SIGKILL)
                    return
                *lines, begun = (begun + text).split(b"\n")
                waiting += map(json.loads, lines)
                continue
            pid, name = key.data
            child = children[pid]
            if text:
                child[name] += text
                if name == "output":
                    child[name] = child[name][-_TAIL:]
                continue
            watch.unregister(key.fd)
            os.close(key.fd)
            child["open"] -= 1
            if child["open"] == 0:
                _, status = os.waitpid(pid, 0)
                outcome = _outcome(children.pop(pid), status)
                imported += outcome.pop("imported", ())
                yield outcome


def _end_late_ones(children: Mapping[int, dict[str, Any]]) -> float | None:
    """End ranks that take longer than their limit; return the seconds to the next limit, None without one."""
    now = time.monotonic()
    for pid, child in children.items():
        if child["until"] <= now:
            child["until"] = float("inf")
            child["late"] = True
            os.kill(pid, signal.SIGKILL)
    first = min((child["until"] for child in children.values()), default=float("inf"))
    return None if first == float("inf") else first - now


def _fork(job: dict[str, Any]) -> tuple[int, int, int]:
    result, to_result = os.pipe()
    output, to_output = os.pipe()
    pid = os.fork()
    if pid:
        os.close(to_result)
        os.close(to_output)
        return pid, result, output
    os.close(result)
    os.close(output)
    os.dup2(to_output, 1)
    os.dup2(to_output, 2)
    os.close(to_output)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from mindspeed_tune.rank_process import run_rank

    def deliver(text: str) -> None:
        rest = memoryview(text.encode())
        while rest:
            rest = rest[os.write(to_result, rest) :]

    run_rank(job, deliver)
    os._exit(1)


def _outcome(child: dict[str, Any], status: int) -> dict[str, Any]:
    found: dict[str, Any]
    try:
        found = json.loads(child["result"])
    except ValueError:
        code = os.waitstatus_to_exitcode(status)
        text = f"its process ended with status {code}"
        if child.get("late"):
            text = f"it hangs: no record after {child['job']['limit']:g} s"
        found = {"kind": "failed", "text": text}
    job, told = child["job"], child["output"].decode(errors="replace")
    return {**found, "rank": job["rank"], "job": job["job"], "output": told}


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
