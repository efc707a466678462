"""Averaged weights as the weights of a checkpoint of their own, for evaluation, finetuning and sampling."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch.distributed import checkpoint as dcp

from mindspeed_core.errors import CheckpointError
from mindspeed_train.interface import (
    COMMON_STATE,
    CheckpointIndex,
    ShardReader,
    publish,
    read_common,
    read_index,
)

_AVERAGE = "optimizer.state.ema_params."
_OF_THE_RUN = ("optimizer", "rng_state")
"""Beginnings of keys that are no part of a model."""


@dataclass(frozen=True)
class Exported:
    """Result of an export.

    Attributes:
        path: the new checkpoint.
        averaged: weights that are averages.
        kept: other tensors of the model, as they are.
    """

    path: Path
    averaged: int
    kept: int


def export_averages(source: Path, target: Path, step: int | None = None) -> Exported:
    """Write a checkpoint whose weights are the averages in another one, in the dtypes of its weights.

    It holds no optimizer: it is loaded with ``--finetune``, ``--pretrained-checkpoint`` or
    ``--no-load-optim``, and sampled. All weights are in memory once.

    Args:
        source: a folder of checkpoints.
        target: the folder that receives it; another one.
        step: this step instead of the latest.

    Raises:
        CheckpointError: there is no such checkpoint, it holds no averages, or the folders are the same.
    """
    if target.resolve() == source.resolve():
        raise CheckpointError(f"{target}: holds the checkpoints that are read; give another folder")
    found = publish.find(source, step, accept_unpublished=True)
    if found is None:
        raise CheckpointError(f"{source}: holds no checkpoint")
    directory, manifest = found.path, found.manifest
    if manifest is not None:
        for problem in publish.check_files(directory, manifest, manifest.files, contents=True):
            raise CheckpointError(problem)
    index = read_index(directory)
    averages = {key.removeprefix(_AVERAGE) for key in index.tensors if key.startswith(_AVERAGE)}
    if not averages:
        raise CheckpointError(
            f"{directory}: holds no averaged weights; --optimizer-selection fused_ema_adamw saves them"
        )
    common = read_common(directory)
    common.pop("optimizer", None)
    step = int(common["iteration"]) if manifest is None else manifest.iteration
    temporary = publish.begin(target, step)
    try:
        kept = _write(directory, index, averages, temporary, common)
        files = {path.name: publish.digest_file(path) for path in sorted(temporary.iterdir())}
        publish.sync_files(sorted(temporary.iterdir()))
        described = replace(manifest or publish.Manifest(step, {}), files=files)
        return Exported(publish.publish(temporary, described), len(averages), kept)
    except BaseException:
        publish.abandon(temporary)
        raise


def _write(
    directory: Path, index: CheckpointIndex, averages: set[str], temporary: Path, common: Mapping[str, Any]
) -> int:
    """Write tensors, objects and common state; return how many tensors are no averages."""
    reader, state = ShardReader(directory, index), {}
    of_the_model = [key for key in sorted(index.tensors) if not key.startswith(_OF_THE_RUN)]
    unknown = sorted(averages.difference(of_the_model))
    if unknown:
        raise CheckpointError(f"{directory}: has an average of {unknown[0]}, and no weight of that name")
    for key in of_the_model:
        entry = index.tensors[key]
        read = f"{_AVERAGE}{key}" if key in averages else key
        stored = index.tensors[read]
        if stored.shape != entry.shape:
            raise CheckpointError(
                f"{directory}: the average of {key} has the shape {list(stored.shape)}, the weight "
                f"{list(entry.shape)}"
            )
        value = {read: torch.empty(stored.shape, dtype=stored.torch_dtype)}
        with _without_groups():
            dcp.load(value, storage_reader=reader, no_dist=True)
        state[key] = value[read].to(entry.torch_dtype)
    objects = {key: None for key in index.objects if not key.startswith(_OF_THE_RUN)}
    if objects:
        with _without_groups():
            dcp.load(objects, storage_reader=reader, no_dist=True)
    with _without_groups():
        dcp.save({**state, **objects}, storage_writer=dcp.FileSystemWriter(temporary), no_dist=True)
    torch.save(dict(common), temporary / COMMON_STATE)
    save_config(CheckpointingConfig("torch_dist", 1), str(temporary))
    return len(of_the_model) - len(averages)


@contextmanager
def _without_groups() -> Iterator[None]:
    """Say nothing of the process group that is not there, which is the intention."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
