"""Process that has torch and megatron-core imported, and forks one process for every rank.

Importing them takes longer than running a rank. Jobs come as lines of JSON on standard input, outcomes leave
as lines on standard output; what ranks print is kept apart. Nothing is written to disk.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import sys
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


def main() -> int:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Whatever a rank or an import prints must not be taken for an answer.
    os.dup2(2, 1)
    _import()
    for line in sys.stdin:
        batch = json.loads(line)
        for outcome in _serve(batch["jobs"], batch["parallel"]):
            answers.write(json.dumps(outcome) + "\n")
            answers.flush()
        answers.write("{}\n")
        answers.flush()
    return 0


def _import() -> None:
    from mindspeed_core.terminal.quiet import quieten

    quieten()
    for name in _MODULES:
        import_module(name)
    gc.collect()
    gc.freeze()


def _serve(jobs: list[Any], parallel: int) -> Any:
    """Yield the outcome of every job as it comes."""
    waiting, running = list(jobs), 0
    watch = selectors.DefaultSelector()
    children: dict[int, dict[str, Any]] = {}
    while waiting or running:
        while waiting and running < parallel:
            job = waiting.pop(0)
            pid, result, output = _fork(job)
            children[pid] = {"job": job, "open": 2, "result": b"", "output": b""}
            watch.register(result, selectors.EVENT_READ, (pid, "result"))
            watch.register(output, selectors.EVENT_READ, (pid, "output"))
            running += 1
        for key, _ in watch.select():
            pid, name = key.data
            child = children[pid]
            text = os.read(key.fd, 1 << 16)
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
                running -= 1
                yield _outcome(children.pop(pid), status)


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
        found = {"kind": "failed", "text": f"its process ended with status {code}"}
    return {**found, "rank": child["job"]["rank"], "output": child["output"].decode(errors="replace")}


if __name__ == "__main__":
    sys.exit(main())
