"""Memory and speed of weights: conversion and export by depth, a rank's reads beside its bytes, ``cp``.

``python benchmarks/weights.py`` writes made-up models of two depths, converts and exports each in a process
of its own, and prints for both: peak memory above that of an idle process, bytes, MB/s, and MB/s of ``cp`` on
the same files in the same run. Ranks of one and of two processes load the shallow model, and count what they
read. The last line has the bars, and the exit status is 1 where one is missed: the peak of the deep model is
at most 32 MB above that of the shallow one and at most largest tensor + chunk + 64 MB above idle, and a rank
reads exactly its bytes where it has the whole model, and at most 1.1 times as many otherwise. ``--write``
keeps all in ``results/weights.json``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import write

MIB = 1 << 20


def write_model(folder: Path, layers: int, hidden: int, vocabulary: int) -> int:
    """Write a bfloat16 model of LLaMA's shape, tensor by tensor; return the bytes of its largest tensor."""
    import torch

    from mindspeed_models.families import families
    from mindspeed_models.recipes.decoder import decoder_size
    from mindspeed_models.weights.safetensors_writer import write_file

    recipe = families()["llama"]
    config = decoder_size(
        layers, hidden, 4 * hidden, hidden // 128, hidden // 128, vocabulary, model_type="llama"
    )
    plan = recipe.make_plan(config)
    shapes: dict[str, tuple[int, ...]] = {}
    sizes = {
        "embed_tokens": (vocabulary, hidden),
        "lm_head": (vocabulary, hidden),
        "norm": (hidden,),
        "layernorm": (hidden,),
        "down_proj": (hidden, 4 * hidden),
        "gate_proj": (4 * hidden, hidden),
        "up_proj": (4 * hidden, hidden),
    }
    for entry in recipe.entries(plan).values():
        for name in entry.sources:
            module = name.split(".")[-2]
            shapes[name] = next(
                (shape for end, shape in sizes.items() if module.endswith(end)), (hidden, hidden)
            )
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: (torch.bfloat16, shape) for name, shape in shapes.items()}
    write_file(
        folder / "model.safetensors", tensors, (torch.randn(shape).bfloat16() for shape in shapes.values())
    )
    return max(2 * torch.Size(shape).numel() for shape in shapes.values())


def _convert(source: Path, target: Path) -> None:
    from mindspeed_models.weights.commands import described_folder
    from mindspeed_models.weights.convert import Conversion, convert

    convert(Conversion(source, target, *described_folder(source, None)))


def _export(source: Path, target: Path) -> None:
    from mindspeed_models.config_file import read_config
    from mindspeed_models.families import family_of
    from mindspeed_models.weights.export import Export, export

    config = read_config(source / "iter_0000000/hf")
    recipe = family_of(config)
    export(Export(source, target, recipe, recipe.make_plan(config), config))


def _idle(source: Path, target: Path) -> None:
    import mindspeed_models.weights.convert
    import mindspeed_models.weights.export  # noqa: F401


def _measured(action: Callable[[Path, Path], None], source: Path, target: Path, result: Any) -> None:
    _idle(source, target)
    start = time.perf_counter()
    action(source, target)
    result.put((peak_bytes(), time.perf_counter() - start))


def peak_bytes() -> int:
    """Return the largest resident memory of this process; that of `getrusage` begins with its parent's."""
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def measure(action: Callable[[Path, Path], None], source: Path, target: Path) -> tuple[int, float]:
    """Return peak bytes and seconds of an action in a process of its own."""
    context = multiprocessing.get_context("spawn")
    result = context.Queue()
    process = context.Process(target=_measured, args=(action, source, target, result))
    process.start()
    found: tuple[int, float] = result.get()
    process.join()
    return found


def copy_seconds(source: Path, target: Path) -> float:
    """Return the seconds of a plain ``cp``."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    return time.perf_counter() - start


def loaded_bytes(source: str, flags: tuple[str, ...]) -> tuple[int, int]:
    """Load a model on this rank of a world; return the bytes that were read, and those of its weights."""
    from mindspeed_core.activation import activate
    from mindspeed_megatron.global_state import destroy_megatron_state
    from mindspeed_models.weights import live
    from mindspeed_train.interface import setup

    readers: list[Any] = []
    plain = live.open_reader

    def noted(*given: Any) -> Any:
        readers.append(plain(*given))
        return readers[-1]

    live.open_reader = noted
    given = (
        *(
            "--load",
            source,
            "--bf16",
            "--mock-data",
            "--train-iters",
            "1",
            "--lr",
            "1e-3",
            "--seq-length",
            "16",
        ),
        *"--micro-batch-size 1 --num-workers 0 --eval-iters 0 --transformer-impl local".split(),
        *("--make-vocab-size-divisible-by", "1", "--use-cpu-initialization", *flags),
    )
    try:
        with activate(list(given), platform="cpu", host="standalone") as session:
            run = setup(session)
            weights = sum(p.numel() * p.itemsize for chunk in run.model for p in chunk.parameters())
            return sum(reader.files.bytes_read for reader in readers), weights
    finally:
        live.open_reader = plain
        destroy_megatron_state()


def shares_read(source: Path, parts: int) -> float:
    """Return the most that one of several tensor-parallel ranks reads, relative to the bytes it has."""
    from mindspeed_testing.worlds import run_world

    flags = ("--tensor-model-parallel-size", str(parts)) if parts > 1 else ()
    return max(
        read / weights for read, weights in run_world(loaded_bytes, parts, str(source), flags, timeout=900)
    )


def bars(rows: list[dict[str, Any]], peaks: dict[str, list[int]]) -> dict[str, bool]:
    """Return whether each bar is reached, by its name."""
    found = {}
    for name, (shallow, deep) in peaks.items():
        found[f"{name}: peak of the deep model at most 32 MB above the shallow one"] = deep - shallow <= 32e6
        found[f"{name}: peak at most largest tensor + chunk + 64 MB above idle"] = all(
            row[f"{name} peak above idle MB"] <= row["bound MB"] for row in rows
        )
    for parts, most in ((1, 1.0), (2, 1.1)):
        share = rows[0][f"read by a rank of {parts}, of its bytes"]
        found[f"a rank of {parts} reads at most {most:g} x its bytes"] = share <= most
    return found


def main() -> int:
    """Print one row for each depth, and the bars; return the exit status."""
    from mindspeed_models.weights.convert import CHUNK_BYTES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs=2, default=[4, 24])
    parser.add_argument("--hidden-size", type=int, default=1536)
    parser.add_argument("--vocab-size", type=int, default=64000)
    parser.add_argument("--folder", type=Path, help="Where models are written; by default a temporary one.")
    parser.add_argument("--write", action="store_true", help="Keep the results.")
    given = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=given.folder))
    peaks: dict[str, list[int]] = {"convert": [], "export": []}
    rows: list[dict[str, Any]] = []
    try:
        idle, _ = measure(_idle, root, root)
        for layers in given.layers:
            source = root / f"hf{layers}"
            largest = write_model(source, layers, given.hidden_size, given.vocab_size)
            size = (source / "model.safetensors").stat().st_size
            row: dict[str, Any] = {"layers": layers, "MB": size / 1e6, "largest tensor MB": largest / 1e6}
            row["cp MB/s"] = size / 1e6 / copy_seconds(source, root / f"copy{layers}")
            for name, action, of, to in (
                ("convert", _convert, source, root / f"mc{layers}"),
                ("export", _export, root / f"mc{layers}", root / f"back{layers}"),
            ):
                peak, seconds = measure(action, of, to)
                peaks[name].append(peak)
                row[f"{name} MB/s"] = size / 1e6 / seconds
                row[f"{name} peak above idle MB"] = (peak - idle) / 1e6
            row["bound MB"] = (largest + CHUNK_BYTES) / 1e6 + 64
            if not rows:
                for parts in (1, 2):
                    row[f"read by a rank of {parts}, of its bytes"] = shares_read(source, parts)
            rows.append(row)
            print(json.dumps(row))
        above = {f"{name} peak, deep above shallow MB": (b - a) / 1e6 for name, (a, b) in peaks.items()}
        reached = bars(rows, peaks)
        print(json.dumps({**above, "bars": reached}))
        if given.write:
            write("weights", {"models": rows, **above, "bars": reached})
        return 0 if all(reached.values()) else 1
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
