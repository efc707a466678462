"""Hugging Face's files into a distributed checkpoint of megatron-core, chunk by chunk.

Needs no process group, model or device, and memory for a few chunks, however deep the model is. One result
loads under every tensor, pipeline, expert and virtual-pipeline size, here and in Megatron-LM.
"""

from __future__ import annotations

import io
import json
import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import mindspeed_models
from mindspeed_core.errors import DataError
from mindspeed_megatron.tracker import TRACKER
from mindspeed_models.config_file import read_config
from mindspeed_models.recipe import ModelPlan, Recipe
from mindspeed_models.weights.distributed_file import (
    Chunk,
    Placed,
    chunks_of,
    metadata,
    write_object,
    write_tensor,
)
from mindspeed_models.weights.free_memory import give_back
from mindspeed_models.weights.hf_files import HfFiles
from mindspeed_models.weights.legacy_files import LegacyReader
from mindspeed_models.weights.module_state import state_keys
from mindspeed_models.weights.needed_features import plan_for_manifest
from mindspeed_models.weights.reader import TableReader
from mindspeed_models.weights.source_names import NAMES, describe_names
from mindspeed_models.weights.unfinished import DigestedFile, UnfinishedWork, described, identity_of
from mindspeed_train.interface import MODEL_ARGUMENTS, publish

HF = "hf"
"""The folder of what is no tensor: configuration, tokenizer, names and order of the files."""
RELEASE = "release"
_UNFINISHED = ".converting"
_WORK = "conversion.json"
"""Says in a finished checkpoint of which work it is the result."""
_BESIDE = (
    "config.json generation_config.json tokenizer.json tokenizer_config.json tokenizer.model "
    "special_tokens_map.json "
    "added_tokens.json vocab.json vocab.txt merges.txt chat_template.jinja chat_template.json"
).split()
_PART_BYTES = 1 << 30
CHUNK_BYTES = 64 << 20
"""Bytes of a chunk: what conversion holds at a time."""


@dataclass(frozen=True)
class Conversion:
    """Options of a conversion.

    Attributes:
        source: folder of Hugging Face.
        target: receives the checkpoint.
        recipe: the family.
        plan: the model.
        dtype: of the weights; None keeps that of the files.
        added_tokens: further rows of the vocabulary.
        chunk_bytes: most bytes of a chunk.
        workers: threads that read and write.
        resume: go on with an unfinished conversion.
        say: is told what got finished.
    """

    source: Path
    target: Path
    recipe: Recipe
    plan: ModelPlan
    dtype: torch.dtype | None = None
    added_tokens: int = 0
    chunk_bytes: int = CHUNK_BYTES
    workers: int = 1
    resume: bool = False
    say: Callable[[str], None] = lambda text: None


def convert(options: Conversion) -> Path:
    """Convert a folder; return the checkpoint, ``iter_0000000`` of the target.

    Raises:
        DataError: the source is damaged or of another model, or the target holds a checkpoint already.
    """
    with HfFiles(options.source, prefix=options.recipe.prefix) as files:
        added = options.added_tokens
        reader = TableReader(files, options.recipe, options.plan, options.plan, added_tokens=added)
        reader.check_repeats()
        kept = {**_beside(options), f"{HF}/{NAMES}": describe_names(files).encode()}
        return write_checkpoint(reader, options, identity_of(files.paths), kept)


def write_checkpoint(
    reader: TableReader | LegacyReader, options: Conversion, sources: Any, kept: Mapping[str, bytes]
) -> Path:
    """Write the model that a reader gives as a checkpoint.

    Args:
        reader: gives global tensors.
        options: of the conversion.
        sources: what identifies the files that are read; plain values.
        kept: small files that go along.

    Raises:
        DataError: the target holds a checkpoint already.
    """
    final = options.target / publish.directory_name(0)
    # Before anything is written: it refuses models that no installed package computes.
    needed = plan_for_manifest(options.plan)
    identity = {
        "files": sources,
        "family": options.recipe.name,
        "model": {name: str(value) for name, value in options.plan.arguments.items()},
        "dtype": str(options.dtype),
        "added_tokens": options.added_tokens,
        "chunk_bytes": options.chunk_bytes,
        "version": mindspeed_models.__version__,
    }
    if options.resume and _is_finished(final, identity):
        # The end came behind the last file, perhaps before the checkpoint was named.
        _point_to(options.target, final)
        options.say(f"{final}: finished earlier")
        return final
    if final.exists() or (options.target / TRACKER).exists():
        raise DataError(f"{options.target}: holds a checkpoint already; name another folder, or remove it")
    work = UnfinishedWork(options.target / _UNFINISHED, identity, resume=options.resume)
    kept = {**kept, _WORK: described(identity).encode()}
    parts = _parts(reader, options)

    def write(numbered: tuple[int, list[Chunk]]) -> str:
        return _write_part(work, *numbered, reader, options)

    with ThreadPoolExecutor(options.workers) as pool:
        for done in pool.map(write, enumerate(parts)):
            options.say(done)
    _write_objects(work, options)
    _finish(work, reader, parts, options, kept, needed)
    work.publish(final)
    _point_to(options.target, final)
    return final


def _is_finished(final: Path, identity: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint is the whole result of this work."""
    known = final / _WORK
    return known.is_file() and known.read_text(encoding="utf-8") == described(identity)


def _parts(reader: TableReader | LegacyReader, options: Conversion) -> list[list[Chunk]]:
    """Return the chunks of each file; a function of sources and options alone."""
    parts: list[list[Chunk]] = [[]]
    size = 0
    for key in reader.keys:
        itemsize = (options.dtype or reader.dtype(key)).itemsize
        for name in (key, *reader.also(key)):
            shape = reader.shape(key)
            for chunk in chunks_of(
                name, shape, itemsize, options.chunk_bytes, experts=reader.has_experts(key)
            ):
                parts[-1].append(chunk)
                size += chunk.elements * itemsize
                if size >= _PART_BYTES:
                    parts.append([])
                    size = 0
    return [part for part in parts if part]


def _file_name(index: int) -> str:
    return f"__{index}_0.distcp"


def _record_name(index: int) -> str:
    return f"part-{index}.json"


def _write_part(
    work: UnfinishedWork,
    index: int,
    chunks: list[Chunk],
    reader: TableReader | LegacyReader,
    options: Conversion,
) -> str:
    name = _file_name(index)
    if work.has(_record_name(index)):
        return f"{name}: finished earlier"
    file = DigestedFile(work.temporary(name))
    placed = []
    try:
        for chunk in chunks:
            tensor = reader.read(chunk.key, chunk.offset, chunk.shape)
            placed.append(write_tensor(file, chunk, tensor.to(options.dtype or tensor.dtype)))
            # Before the next chunk is read.
            del tensor
            give_back()
    except BaseException:
        file.abort()
        raise
    size, digest = file.close()
    work.finish(name)
    record = {"size": size, "digest": digest, "placed": [each.as_list() for each in placed]}
    work.write(_record_name(index), json.dumps(record))
    return f"{name}: {len(chunks)} chunks, {size:,} bytes"


def _write_objects(work: UnfinishedWork, options: Conversion) -> None:
    """Write what modules of megatron-core save beside tensors: empty, and asked for by a load."""
    name = "__objects_0.distcp"
    file = DigestedFile(work.temporary(name))
    entries = options.recipe.entries(options.plan).values()
    placed = [write_object(file, key, None) for key in state_keys(entries)]
    size, digest = file.close()
    work.finish(name)
    record = {"size": size, "digest": digest, "placed": [each.as_list() for each in placed]}
    work.write("part-objects.json", json.dumps(record))


def _finish(
    work: UnfinishedWork,
    reader: TableReader | LegacyReader,
    parts: Iterable[list[Chunk]],
    options: Conversion,
    kept: Mapping[str, bytes],
    needed: Mapping[str, Any],
) -> None:
    """Write everything that describes the parts, and remove their records."""
    records = {_file_name(index): _record_name(index) for index, _ in enumerate(parts)}
    records["__objects_0.distcp"] = "part-objects.json"
    placed: dict[str, list[Placed]] = {}
    files: dict[str, tuple[int, str]] = {}
    for name, record_name in records.items():
        record = json.loads((work.folder / record_name).read_text(encoding="utf-8"))
        placed[name] = [Placed.of_list(values) for values in record["placed"]]
        files[name] = (record["size"], record["digest"])
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    also: list[str] = []
    for key in reader.keys:
        also += reader.also(key)
        for name in (key, *reader.also(key)):
            shapes[name], dtypes[name] = reader.shape(key), options.dtype or reader.dtype(key)
    rows = options.plan.vocabulary + options.added_tokens
    arguments = _arguments(options.plan, rows)
    contents: dict[str, bytes] = {
        ".metadata": metadata(placed, shapes, dtypes),
        "common.pt": _common(arguments, also),
        "metadata.json": json.dumps(
            {
                "sharded_backend": "torch_dist",
                "sharded_backend_version": 1,
                "common_backend": "torch",
                "common_backend_version": 1,
            }
        ).encode(),
    }
    contents.update(kept)
    for name, content in contents.items():
        path = work.folder / name
        path.parent.mkdir(exist_ok=True)
        publish.write_synced(path, memoryview(content))
        files[name] = publish.digest_file(path)
    model = {name: arguments[name] for name in MODEL_ARGUMENTS if name in arguments}
    versions = {"mindspeed-models": mindspeed_models.__version__, "torch": torch.__version__}
    manifest = publish.Manifest(
        0, files, plan=needed, versions=versions, layout={"tp": 1, "pp": 1}, model=model
    )
    for name in records.values():
        (work.folder / name).unlink()
    publish.write_synced(work.folder / publish.MANIFEST, publish.describe(manifest))


def _arguments(plan: ModelPlan, rows: int) -> dict[str, Any]:
    """Return what Megatron-LM's loader and ``--use-checkpoint-args`` read of ``args``."""
    known = {
        name: value for name, value in plan.as_built().items() if isinstance(value, (bool, int, float, str))
    }
    return {
        **known,
        "max_position_embeddings": plan.defaults.get("max_position_embeddings"),
        "vocab_size": rows,
        "padded_vocab_size": rows,
        "make_vocab_size_divisible_by": 1,
        "add_position_embedding": True,
        "tokenizer_type": None,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "world_size": 1,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "skipped_train_samples": 0,
        "no_save_optim": True,
        "no_save_rng": True,
    }


def _common(arguments: Mapping[str, Any], also: list[str]) -> bytes:
    buffer = io.BytesIO()
    described = {"non_homogeneous_layers": True, "singleton_local_shards": False}
    state = {
        "args": Namespace(**arguments),
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": described,
        "repeated_keys": also,
    }
    torch.save(state, buffer)
    return buffer.getvalue()


def _beside(options: Conversion) -> dict[str, bytes]:
    """Return what is no tensor, so that export and training need nothing else; code is not copied."""
    found = {f"{HF}/{name}": (options.source / name) for name in _BESIDE}
    contents = {name: path.read_bytes() for name, path in found.items() if path.is_file()}
    if options.added_tokens:
        config = {**read_config(options.source), "vocab_size": options.plan.vocabulary + options.added_tokens}
        contents[f"{HF}/config.json"] = (json.dumps(config, indent=2) + "\n").encode()
    return contents


def _point_to(target: Path, final: Path) -> None:
    """Name the checkpoint as weights without a step, as Megatron-LM's converters do."""
    link = target / RELEASE
    if not link.is_symlink():
        os.symlink(final.name, link)
    publish.write_tracker(target, RELEASE)
