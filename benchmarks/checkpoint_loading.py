"""Loading time and memory of a checkpoint, by our reader and by torch's own on the same files.

A checkpoint of tensors of several sizes is written by ``torch.distributed.checkpoint`` and given an index of
ours. Then new processes load it in turns: torch's reader, which unpickles; ours over ``index.json``; ours
over the pickled ``.metadata``. Each tells the seconds of its load, the index included, and its peak memory
above the tensors that it fills. A first turn leaves the files in the cache of the system.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

from machine import write

from mindspeed_core.platforms.process_memory import peak_resident_bytes

READERS = ("torch", "ours, index.json", "ours, .metadata")


def tensors(size: int, empty: bool) -> dict[str, object]:
    """Return tensors of ``size`` bytes together: matrices as of a model's layers, and many small ones."""
    import torch

    make = torch.empty if empty else torch.randn
    rows = 2048
    count = max(size // (rows * rows * 4), 1)
    large = {f"layer.{at}.weight": make(rows, rows) for at in range(count)}
    return {**large, **{f"layer.{at}.norm": make(rows) for at in range(200)}}


def prepare(folder: Path, size: int) -> None:
    """Write the checkpoint."""
    from torch.distributed import checkpoint as dcp

    from mindspeed_train.checkpoint import index

    dcp.save(tensors(size, empty=False), checkpoint_id=folder / "plain", no_dist=True)
    found = index.read_index(folder / "plain")
    (folder / "indexed").mkdir()
    for path in (folder / "plain").iterdir():
        (folder / "indexed" / path.name).hardlink_to(path)
    (folder / "indexed" / index.NAME).write_text(index.describe(found))


def load(folder: Path, reader: str, size: int) -> dict[str, float]:
    """Load it once in this process."""
    from torch.distributed import checkpoint as dcp

    from mindspeed_train.checkpoint.index import read_index
    from mindspeed_train.checkpoint.shard_reader import ShardReader

    target = tensors(size, empty=True)
    for tensor in target.values():
        tensor.zero_()  # type: ignore[attr-defined]
    directory = folder / ("indexed" if "index" in reader else "plain")
    # That of `getrusage` begins with what the parent had, which wrote the checkpoint.
    before = peak_resident_bytes()
    begin, processor = time.perf_counter(), time.process_time()
    if reader == "torch":
        source: object = dcp.FileSystemReader(directory)
    else:
        source = ShardReader(directory, read_index(directory))
    dcp.load(target, storage_reader=source, no_dist=True)  # type: ignore[arg-type]
    seconds, of_core = time.perf_counter() - begin, time.process_time() - processor
    peak = peak_resident_bytes() - before
    return {"seconds": seconds, "cpu_seconds": of_core, "peak_mib": peak / 2**20}


def main() -> None:
    """Run the readers in turns, print medians, and write them beside the machine's description."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of the checkpoint")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--load", nargs=2, metavar=("FOLDER", "READER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    size = args.mib << 20
    if args.load:
        print(json.dumps(load(Path(args.load[0]), args.load[1], size)))
        return
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, size)
        runs: dict[str, list[dict[str, float]]] = {reader: [] for reader in READERS}
        for turn in range(args.turns + 1):
            for reader in READERS:
                command = [sys.executable, __file__, "--mib", str(args.mib), "--load", name, reader]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                # The first turn fills the cache of the system.
                if turn:
                    runs[reader].append(json.loads(done.stdout.splitlines()[-1]))
    for reader, measured in runs.items():
        rows[reader] = {key: statistics.median(run[key] for run in measured) for key in measured[0]}
        rows[reader]["of_torch"] = rows[reader]["seconds"] / rows["torch"]["seconds"]
        rows[reader]["cpu_of_torch"] = rows[reader]["cpu_seconds"] / rows["torch"]["cpu_seconds"]
        shown = ", ".join(f"{key} {value:.3f}" for key, value in rows[reader].items())
        print(f"{reader}: {shown}")
    write("checkpoint_loading", {"mib": args.mib, "turns": args.turns, "readers": rows})


if __name__ == "__main__":
    main()
