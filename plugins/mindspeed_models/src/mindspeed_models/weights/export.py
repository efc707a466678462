"""A distributed checkpoint of megatron-core as Hugging Face's files, tensor by tensor.

Headers come first, since a table and an index say every shape before a tensor is read; then the tensors are
streamed behind them. What was converted comes back as the same files, byte for byte of every tensor.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from mindspeed_core.errors import DataError
from mindspeed_models.config_file import NAME as CONFIG
from mindspeed_models.config_file import Keys
from mindspeed_models.recipe import ModelPlan, Recipe
from mindspeed_models.weights.hf_files import shown
from mindspeed_models.weights.legacy_files import LegacyFiles, open_older
from mindspeed_models.weights.legacy_pipe import PipedFiles
from mindspeed_models.weights.mcore_files import McoreFiles
from mindspeed_models.weights.reader import EMBEDDING, HEAD, VOCABULARY
from mindspeed_models.weights.safetensors_writer import write_file
from mindspeed_models.weights.source_names import NAMES, SourceNames, read_names
from mindspeed_models.weights.table import Entry
from mindspeed_models.weights.unfinished import UnfinishedWork, identity_of

_Files: TypeAlias = McoreFiles | LegacyFiles | PipedFiles
_HEAD = "lm_head.weight"
_PIECE_BYTES = 64 << 20
SHARD_BYTES = 5_000_000_000
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Export:
    """Options of an export.

    Attributes:
        source: a checkpoint, or a folder of them.
        target: receives the files; does not exist yet.
        recipe: the family.
        plan: the model.
        config: its ``config.json``.
        dtype: of the weights; None takes that of ``config.json``, or of the checkpoint.
        shard_bytes: most bytes of a file; None repeats the files that were converted.
        step: this step of the source and no other.
        legacy: the source is in the older layout of a file for each rank.
        seed_gqa_order: undo the order of query heads that older converters wrote.
        workers: threads that read and write, a file each.
        resume: go on with an unfinished export.
        say: is told what got finished.
    """

    source: Path
    target: Path
    recipe: Recipe
    plan: ModelPlan
    config: dict[str, Any]
    dtype: torch.dtype | None = None
    shard_bytes: int | None = None
    step: int | None = None
    legacy: bool = False
    seed_gqa_order: bool = False
    workers: int = 1
    resume: bool = False
    say: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class _Output:
    """One tensor of the files: where its rows come from."""

    entry: Entry
    source: int
    stored: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def export(options: Export) -> Path:
    """Export a checkpoint; return the folder.

    Raises:
        DataError: the checkpoint is of another model, or the target exists.
        CheckpointError: it is damaged.
    """
    if options.target.exists():
        raise DataError(f"{options.target}: exists already; name another folder, or remove it")
    with _open(options) as files:
        outputs = _outputs(files, options)
        known = read_names(files.hf)
        shards = _shards(outputs, known, options.shard_bytes)
        identity = {
            "source": identity_of([path for path in files.path.rglob("*") if path.is_file()]),
            "config": options.config,
            "family": options.recipe.name,
            "shards": {
                name: {each: [str(o.dtype), o.shape] for each, o in inside.items()}
                for name, inside in shards.items()
            },
        }
        folder = options.target.with_name(f".{options.target.name}.exporting")
        work = UnfinishedWork(folder, identity, resume=options.resume)

        def write(name: str) -> str:
            if work.has(name):
                return f"{name}: finished earlier"
            inside = shards[name]
            described = {each: (output.dtype, output.shape) for each, output in inside.items()}
            size = write_file(work.temporary(name), described, _parts(files, options.plan, inside))
            work.finish(name)
            return f"{name}: {len(inside)} tensors, {size:,} bytes"

        with ThreadPoolExecutor(options.workers) as pool:
            for done in pool.map(write, shards):
                options.say(done)
        _describe(work, shards, options.config)
        if files.hf.is_dir():
            for path in files.hf.iterdir():
                if path.is_file() and path.name not in (NAMES, CONFIG):
                    shutil.copyfile(path, work.folder / path.name)
    work.publish(options.target)
    return options.target


def _open(options: Export) -> _Files:
    if options.legacy:
        return open_older(options.source, options.plan, seed_gqa_order=options.seed_gqa_order)
    return McoreFiles(options.source, options.step)


def _outputs(files: _Files, options: Export) -> dict[str, _Output]:
    """Return every tensor of the files by name.

    Raises:
        DataError: the checkpoint lacks tensors, has others, or they have other shapes; all are named.
    """
    plan, missing = options.plan, []
    found: dict[str, _Output] = {}
    used: set[str] = set()
    wanted = options.dtype or _DTYPES.get(str(Keys(options.config).get("dtype", "torch_dtype")))
    for entry in options.recipe.entries(plan).values():
        stored = files.spelled(entry.key, entry.also)
        if stored is None:
            missing.append(entry.key)
            continue
        used.update(name for name in (stored, *entry.also))
        shape = files.shape(entry.key, stored)
        if entry.expert is not None:
            shape = shape[1:]
        if entry.key in VOCABULARY:
            if shape[0] < plan.vocabulary:
                raise DataError(
                    f"{files.path}: tensor {stored!r} has {shape[0]} rows, vocab_size of the model is "
                    f"{plan.vocabulary}"
                )
            shape = (plan.vocabulary, *shape[1:])
        dtype = files.dtype(stored)
        if wanted is not None and dtype != wanted and not _keeps_precision(entry.key):
            dtype = wanted
        for index, (name, each) in enumerate(zip(entry.sources, entry.source_shapes(shape, plan))):
            found[name] = _Output(entry, index, stored, tuple(each), dtype)
        found.update(dict.fromkeys(entry.repeats, found[entry.sources[0]]))
    extra = files.keys() - used
    if plan.tied:
        # Older files repeat it.
        extra.discard(HEAD)
    if missing or extra:
        parts = [f"{len(missing)} tensors are missing: {shown(missing)}"] if missing else []
        parts += [f"{len(extra)} tensors are no part of it: {shown(extra)}"] if extra else []
        raise DataError(
            f"{files.path}: is not the model of the family {options.recipe.name} that config.json describes; "
            + "; ".join(parts)
        )
    if plan.tied:
        found[_HEAD] = found[options.recipe.entries(plan)[EMBEDDING, None].sources[0]]
    return found


def _keeps_precision(key: str) -> bool:
    """Return whether a tensor stays in float32: the bias of a router is no weight."""
    return key.endswith(".expert_bias")


def _shards(
    outputs: dict[str, _Output], source_names: SourceNames | None, shard_bytes: int | None
) -> dict[str, dict[str, _Output]]:
    """Return the files with their tensors: those that were converted, or cut by size."""
    if source_names is not None and shard_bytes is None:
        spelled = {
            name: name if name in outputs else source_names.prefix + name
            for each in source_names.files.values()
            for name in each
        }
        given = set(spelled.values())
        needed = {name for name in outputs if name != _HEAD or not _is_tied(outputs)}
        if needed <= given and given <= outputs.keys():
            return {
                _safetensors_name(file): {name: outputs[spelled[name]] for name in names}
                for file, names in source_names.files.items()
            }
    written = {name: each for name, each in outputs.items() if name != _HEAD or not _is_tied(outputs)}
    groups: list[dict[str, _Output]] = [{}]
    size = 0
    for name, output in written.items():
        count = output.dtype.itemsize * torch.Size(output.shape).numel()
        if groups[-1] and size + count > (shard_bytes or SHARD_BYTES):
            groups.append({})
            size = 0
        groups[-1][name] = output
        size += count
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups)}


def _is_tied(outputs: dict[str, _Output]) -> bool:
    return _HEAD in outputs and outputs[_HEAD].entry.key == EMBEDDING


def _safetensors_name(file: str) -> str:
    if file.endswith(".safetensors"):
        return file
    return "model" + file.removeprefix("pytorch_model").removesuffix(".bin") + ".safetensors"


def _parts(files: _Files, plan: ModelPlan, inside: dict[str, _Output]) -> Iterator[torch.Tensor]:
    """Yield the elements of tensors in order, in pieces of limited size."""
    for output in inside.values():
        entry, shape = output.entry, output.shape
        stored = files.shape(entry.key, output.stored)
        lead = () if entry.expert is None else (entry.expert,)
        if not shape:
            yield files.read(entry.key, output.stored, (), ()).to(output.dtype)
            continue
        total = stored[len(lead)] if entry.key not in VOCABULARY else shape[0]
        row = output.dtype.itemsize * max(1, torch.Size(shape[1:]).numel())
        step = max(1, _PIECE_BYTES // row)
        for first, last in _runs(entry, output.source, total, plan):
            for start in range(first, last, step):
                size = (*(1 for _ in lead), min(step, last - start), *shape[1:])
                offset = (*lead, start, *(0 for _ in shape[1:]))
                yield files.read(entry.key, output.stored, offset, size).to(output.dtype)


def _runs(entry: Entry, source: int, rows: int, plan: ModelPlan) -> list[tuple[int, int]]:
    """Return the row ranges of megatron-core's tensor that are one source's rows, in the source's order."""
    runs, at = [], 0
    for segment in entry.segments(rows, plan):
        if segment.source == source:
            runs.append((segment.start, at, at + segment.rows))
        at += segment.rows
    return [(first, last) for _, first, last in sorted(runs)]


def _describe(work: UnfinishedWork, shards: dict[str, dict[str, _Output]], config: dict[str, Any]) -> None:
    """Write configuration and, for several files, their index."""
    work.write(CONFIG, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    if len(shards) == 1:
        return
    homes = {name: file for file, inside in shards.items() for name in inside}
    total = sum(
        output.dtype.itemsize * torch.Size(output.shape).numel()
        for inside in shards.values()
        for output in inside.values()
    )
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(homes.items()))}
    work.write("model.safetensors.index.json", json.dumps(index, indent=2) + "\n")
