"""Train on a sequence that does not fit into one process's memory, and does when four processes share it.

Each process may have so much memory and no more: the operating system refuses further allocations
(``RLIMIT_DATA``; Linux). The same model trains on the same sequence with 1, 2 and 4 ranks of context
parallelism; what did not fit is repeated without the limit, so that the curve of memory is whole.

Run it in an environment that has mindspeed-core, mindspeed-kernels and mindspeed-cp:
``python examples/long_context/demo.py [--out FOLDER] [--seq-length N] [--cap-mib N]``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from drawing import draw

MODEL = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 1024 --swiglu --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --vocab-size 511"
).split()
TRAINING = (
    "--platform cpu --mock-data --micro-batch-size 1 --global-batch-size 1 --optimizer adam --lr 1e-3 "
    "--lr-decay-style constant --eval-iters 0 --num-workers 0 --no-progress --log-interval 1"
).split()
STACK = 1 << 20
"""Bytes of a thread's stack: they count as memory whether they are used or not."""
_LIMITED = ("sh", "-c", 'ulimit -s "$1"; [ "$2" = 0 ] || ulimit -d "$2"; shift 2; exec "$@"', "limited")
"""Runs a command after two limits in KiB, of the stack and (unless 0) of private memory."""


@dataclass
class Result:
    """One training.

    Attributes:
        ranks: processes that shared the sequence.
        limited: whether the limit was in force.
        trained: whether all steps were made.
        peak_bytes: most private memory of a process that was seen.
        losses: of the steps.
        reason: why it stopped, where it did.
    """

    ranks: int
    limited: bool
    trained: bool
    peak_bytes: int
    losses: list[float]
    reason: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Train with every number of ranks and draw the curve."""
    parser = argparse.ArgumentParser(description="One long sequence under a memory limit.")
    parser.add_argument("--out", type=Path, help="folder of all files (default runs/long-context-<time>)")
    parser.add_argument("--seq-length", type=int, default=16384, help="tokens of the sequence")
    parser.add_argument("--cap-mib", type=int, default=1024, help="private memory of a process, in MiB")
    parser.add_argument("--steps", type=int, default=2, help="training steps")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of processes")
    options = parser.parse_args(argv)
    out: Path = options.out or Path("runs") / f"long-context-{time.strftime('%Y%m%d-%H%M%S')}"
    out.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    for ranks in options.ranks:
        for cap in (options.cap_mib << 20, 0):
            print(f"\n== {options.seq_length:,} tokens on {ranks} process(es), {_allowed(cap)}", flush=True)
            flags = ["--seq-length", str(options.seq_length), "--train-iters", str(options.steps)]
            flags += ["--max-position-embeddings", str(options.seq_length)]
            results.append(train(ranks, cap, flags, out / f"ranks{ranks}{'' if cap else '-unlimited'}"))
            result = results[-1]
            verdict = "trained" if result.trained else "did not fit"
            print(f"   {verdict}, at most {result.peak_bytes / 2**20:,.0f} MiB in a process", flush=True)
            print(f"   losses {result.losses}" if result.trained else f"   {result.reason}", flush=True)
            if result.trained:
                break
            if not cap:
                print(f"   {out} has its output", flush=True)
                return 1
    curve = {result.ranks: result.peak_bytes for result in results if result.trained}
    (out / "memory.json").write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    picture = draw(curve, options.cap_mib << 20, f"{options.seq_length:,} tokens: memory of a process")
    (out / "memory.svg").write_text(picture, encoding="utf-8")
    print(f"\nthe curve is {out / 'memory.svg'}, its numbers {out / 'memory.json'}")
    return 0 if any(result.trained and result.limited for result in results) else 1


def _allowed(cap: int) -> str:
    return f"{cap >> 20:,} MiB each" if cap else "as much memory as they like"


def train(ranks: int, cap: int, flags: Sequence[str], folder: Path, most_seconds: float = 3600.0) -> Result:
    """Train in new processes and watch their memory.

    A program that is refused memory may wait for ever, in a library that tries again: it is ended after
    ``most_seconds``.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    # One process gets attention without a score matrix too: what is compared is the split alone.
    attention = ["--context-parallel-size", str(ranks)] if ranks > 1 else ["--use-flash-attn"]
    command = [*launcher, "-m", "mindspeed_core.train", *MODEL, *TRAINING, *flags, *attention]
    command = [*_LIMITED, *(str(size >> 10) for size in (STACK, cap)), *command, "--run-dir", str(folder)]
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "output.log"
    peak = 0
    with log.open("w") as output:
        program = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        last = time.monotonic() + most_seconds
        status: int | None = None
        while status is None and time.monotonic() < last:
            try:
                status = program.wait(0.1)
            except subprocess.TimeoutExpired:
                peak = max([peak, *map(private_bytes, children(program.pid))])
        if status is None:
            for process in (*children(program.pid), program.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            program.wait()
    losses = _losses(folder / "metrics.jsonl")
    reason = "" if status == 0 else _reason(log) if status else f"did not end within {most_seconds:g} s"
    return Result(ranks, bool(cap), status == 0, peak, losses, reason)


def children(parent: int) -> list[int]:
    """Return the processes that a process started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The name before the parent may contain anything but ends with the last parenthesis.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == parent:
                found.append(int(entry.name))
    return found


def private_bytes(process: int) -> int:
    """Return the bytes that count against the limit (``VmData``); 0 for a process that is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData")), 0)


def _losses(metrics: Path) -> list[float]:
    if not metrics.exists():
        return []
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [round(row["loss"], 6) for row in rows if "loss" in row]


def _reason(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    words = ("allocate memory", "MemoryError", "E-VALIDATE", "error:")
    reasons = [line.strip() for line in lines if any(word in line for word in words)]
    return (reasons or [line.strip() for line in reversed(lines) if line.strip()] or ["no output"])[0]


if __name__ == "__main__":
    sys.exit(main())
