"""Per-step losses of `mindspeed-train` and of Megatron-LM's own training, side by side.

Run with MEGATRON_LM_PATH naming a checkout of core_v0.16.1; README.md beside this file has the recipe. The
exit status is 0 when every loss of every case agrees within the tolerance.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cases import CASES, OURS, THEIRS, Case, flags_of
from corpus import write_corpus

_HERE = Path(__file__).resolve().parent
TOLERANCE = 1e-6
_LONGEST_SECONDS = 1800


def main() -> int:
    """Compare, print a table, answer the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, help="steps of each run (default 50)")
    parser.add_argument("--case", action="append", help="only this case; may be given several times")
    parser.add_argument(
        "--megatron-python",
        default=os.environ.get("MEGATRON_LM_PYTHON", sys.executable),
        help="interpreter with what the checkout imports (default MEGATRON_LM_PYTHON, or this one)",
    )
    parser.add_argument("--record", type=Path, help="write Megatron-LM's numbers to this JSON file")
    arguments = parser.parse_args()
    checkout = os.environ.get("MEGATRON_LM_PATH", "")
    if not (Path(checkout) / "pretrain_gpt.py").is_file():
        print(f"MEGATRON_LM_PATH {checkout!r}: name a checkout of Megatron-LM core_v0.16.1", file=sys.stderr)
        return 2
    known = {case.name: case for case in CASES}
    chosen = [known[name] for name in arguments.case] if arguments.case else list(CASES)
    recorded: dict[str, dict[str, list[float]]] = {}
    agreed = True
    print(
        f"{'case':32} {'steps':>5} {'first loss':>10} {'last loss':>10} {'loss, off':>12} {'norm, off':>12}"
    )
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "corpus"
        write_corpus(prefix)
        for index, case in enumerate(chosen):
            flags = [*flags_of(case, arguments.steps), "--data-path", str(prefix)]
            here = Path(folder) / str(index)
            here.mkdir()
            theirs = run_megatron_lm(case, flags, here, arguments.megatron_python)
            ours = run_ours(case, flags, here)
            loss = worst(theirs["lm loss"], ours["lm loss"])
            norm = worst(theirs["grad_norm"], ours["grad_norm"])
            recorded[case.name] = theirs
            complete = len(theirs["lm loss"]) == len(ours["lm loss"]) == arguments.steps
            if arguments.record is not None:
                arguments.record.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
            fine = complete and loss <= TOLERANCE
            agreed &= fine
            print(
                f"{case.name:32} {len(ours['lm loss']):5d} {ours['lm loss'][0]:10.6f} "
                f"{ours['lm loss'][-1]:10.6f} {loss:12.2e} {norm:12.2e}{'' if fine else '  DIFFERENT'}",
                flush=True,
            )
    return 0 if agreed else 1


def worst(expected: Sequence[float], found: Sequence[float]) -> float:
    """The largest relative difference."""
    return max((abs(a - b) / abs(a) for a, b in zip(expected, found)), default=float("inf"))


def run_megatron_lm(case: Case, flags: Sequence[str], folder: Path, python: str) -> dict[str, list[float]]:
    """Numbers of Megatron-LM's training, one per step."""
    numbers = folder / "theirs.jsonl"
    cache = ["--data-cache-path", str(folder / "their-cache")]
    command = [python, str(_HERE / "emulated_rank.py"), str(numbers), *flags, *THEIRS, *cache]
    _run(command, case.world_size, folder / "theirs.log")
    return _columns([json.loads(line) for line in numbers.read_text(encoding="utf-8").splitlines()])


def run_ours(case: Case, flags: Sequence[str], folder: Path) -> dict[str, list[float]]:
    """Numbers of this package's training, one per step."""
    places = ["--data-cache-path", str(folder / "our-cache"), "--run-dir", str(folder / "run")]
    command = [sys.executable, "-m", "mindspeed_core.train", *flags, *OURS, *places]
    _run(command, case.world_size, folder / "ours.log")
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [record for record in map(json.loads, lines) if "grad_norm" in record]
    return _columns([{"lm loss": record["loss"], "grad_norm": record["grad_norm"]} for record in steps])


def environment_for(python: Path) -> dict[str, str]:
    """What the checkout needs to run with this interpreter, beside the rank."""
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        # The checkout compiles its index helpers for the first python3 and python3-config of the path.
        "PATH": os.pathsep.join(
            (str(python.parent), str(python.resolve().parent), os.environ.get("PATH", ""))
        ),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_HERE.parent.parent), os.environ.get("PYTHONPATH")))),
    }


def _run(command: Sequence[str], world_size: int, log: Path) -> None:
    """Run one process per rank, as torchrun does."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    environment = environment_for(Path(command[0])) | {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
    }
    with log.open("w", encoding="utf-8") as file:
        workers = [
            subprocess.Popen(
                command,
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            for rank in range(world_size)
        ]
        try:
            statuses = [worker.wait(_LONGEST_SECONDS) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
    if any(statuses):
        text = log.read_text(encoding="utf-8", errors="replace")
        raise SystemExit(f"{' '.join(command)}\nended with statuses {statuses}:\n{text[-6000:]}")


def _columns(records: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    return {name: [record[name] for record in records] for name in ("lm loss", "grad_norm")}


if __name__ == "__main__":
    sys.exit(main())
