"""Memory and speed of weights: conversion and export by depth, a rank's reads beside its bytes, ``cp``.

``python benchmarks/weights.py`` writes made-up models of two depths, converts and exports each in a process
of its own, and prints for both: peak memory above that of an idle process, bytes, MB/s, and MB/s of ``cp`` on
the same files in the same run. The peak of the deep model may be at most 32 MB above that of the shallow one,
and at most largest tensor + chunk + 64 MB above idle.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result.put((peak, time.perf_counter() - start))


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


def shares_read(source: Path, parts: int) -> float:
    """Return bytes that one of several tensor-parallel ranks reads, relative to the bytes of its share."""
    from mindspeed_models.weights.commands import described_folder
    from mindspeed_models.weights.hf_files import HfFiles
    from mindspeed_models.weights.reader import TableReader

    recipe, plan = described_folder(source, None)
    with HfFiles(source) as files:
        reader = TableReader(files, recipe, plan, plan)
        wanted = 0
        for key in reader.keys:
            shape = list(reader.shape(key))
            by_columns = key.endswith(("linear_proj.weight", "linear_fc2.weight"))
            if len(shape) > 1:
                shape[int(by_columns)] //= parts
            wanted += reader.dtype(key).itemsize * reader.read(key, [0] * len(shape), shape).numel()
        return files.bytes_read / wanted


def main() -> None:
    """Print one row for each depth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs=2, default=[4, 24])
    parser.add_argument("--hidden-size", type=int, default=1536)
    parser.add_argument("--vocab-size", type=int, default=64000)
    parser.add_argument("--folder", type=Path, help="Where models are written; by default a temporary one.")
    given = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=given.folder))
    peaks: dict[str, list[int]] = {"convert": [], "export": []}
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
                row[f"{name} bound MB"] = largest / 1e6 + 64 + 64
            row["read by a rank of 1, of its share"] = shares_read(source, 1)
            row["read by a rank of 2, of its share"] = shares_read(source, 2)
            print(json.dumps(row))
        print(
            json.dumps(
                {f"{name} peak, deep above shallow MB": (b - a) / 1e6 for name, (a, b) in peaks.items()}
            )
        )
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
