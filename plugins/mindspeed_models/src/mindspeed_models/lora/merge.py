"""Adapters merged into their base: ``W + (alpha / r) · B A`` in float32, rounded once to the base's dtype."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from safetensors import safe_open
from torch import Tensor
from torch.distributed import checkpoint as dcp

from mindspeed_core.errors import UserError
from mindspeed_models.lora.adapter_files import Adapters, names_of
from mindspeed_models.lora.base_digest import digest_of_whole
from mindspeed_models.lora.stored_tensors import StoredTensors
from mindspeed_models.weights.safetensors_file import read_header
from mindspeed_train.interface import COMMON_STATE, ShardReader, publish

if TYPE_CHECKING:
    from mindspeed_models.recipe import ModelPlan, Recipe
    from mindspeed_models.weights.table import Entry

_DIGEST_BITS = 2**64 - 1


@dataclass
class Rounding:
    """Loss of updates to the dtype of the weights.

    Attributes:
        merged: linears that were updated.
        largest: largest update.
        lost: largest difference between an update and what the weight took of it.
        changes: elements with an update.
        vanished: those of them whose weight did not change.
    """

    merged: int = 0
    largest: float = 0.0
    lost: float = 0.0
    changes: int = 0
    vanished: int = 0

    def add(self, before: Tensor, update: Tensor, after: Tensor) -> None:
        """Count one weight."""
        took = after.float() - before.float()
        self.merged += 1
        self.largest = max(self.largest, float(update.abs().max()))
        self.lost = max(self.lost, float((took - update).abs().max()))
        moved = update != 0
        self.changes += int(moved.sum())
        self.vanished += int((moved & (took == 0)).sum())

    def __str__(self) -> str:
        """Return it as a sentence."""
        text = f"{self.merged} weights updated by up to {self.largest:.3g}, rounded by up to {self.lost:.3g}"
        if self.changes and self.vanished * 2 > self.changes:
            share = 100.0 * self.vanished / self.changes
            text += (
                f"; {share:.0f} % of the updates vanished in the weights' dtype: merge into a base in "
                "float32, or keep the adapter apart"
            )
        return text


def updated(weight: Tensor, update: Tensor, rounding: Rounding, where: str) -> Tensor:
    """Return a weight with its update, in its own dtype.

    Raises:
        UserError: the update is of another shape, or the weight of 8 bits.
    """
    if weight.shape != update.shape:
        raise UserError(
            f"{where}: the update has the shape {list(update.shape)}, the weight {list(weight.shape)}; "
            "the adapter is of another model"
        )
    if weight.element_size() < 2:
        raise UserError(f"{where}: {weight.dtype} weights take no updates; convert the base to bfloat16")
    found = (weight.float() + update).to(weight.dtype)
    rounding.add(weight, update, found)
    return found


def merge_into_checkpoint(
    base: Path, adapters: Adapters, target: Path, *, any_base: bool = False
) -> Rounding:
    """Write a distributed checkpoint of the base with merged weights; all of them are in memory once.

    Args:
        base: a folder of checkpoints.
        adapters: whole tensors.
        target: the folder that receives it; another one.
        any_base: merge into another base than that of the adapters too.

    Raises:
        UserError: the base is another one, or lacks a linear.
    """
    stored = StoredTensors.find(base)
    if not any_base:
        # What was trained whole is no part of the base that stayed as it was.
        frozen = (key for key in stored.layer_keys() if key not in adapters.whole)
        total = sum(digest_of_whole(key, stored.read(key)) for key in frozen)
        _check_digest(adapters, total, base)
    rounding = Rounding()
    state = {key: stored.read(key) for key in stored.stored_keys()}
    places = {key: _place(state, key, str(base)) for key in (*_weights(adapters), *adapters.whole)}
    for key, pair in adapters.pairs.items():
        weight = places[f"{key}.weight"]
        weight.copy_(updated(weight.clone(), pair.delta(adapters.scale), rounding, key))
    for key, tensor in adapters.whole.items():
        _replace_rows(places[key], tensor, key)
    _publish(stored, state, target)
    return rounding


def _weights(adapters: Adapters) -> list[str]:
    return [f"{key}.weight" for key in adapters.pairs]


def _place(state: Mapping[str, Tensor], key: str, where: str) -> Tensor:
    """Return the tensor of a key, or the part of one that holds all layers."""
    if key in state:
        return state[key]
    before, mark, rest = key.partition("decoder.layers.")
    number, _, name = rest.partition(".")
    together = state.get(f"{before}{mark}{name}")
    if together is None or not number.isdecimal() or int(number) >= len(together):
        raise UserError(f"{where}: has no weight {key!r}; the adapter is of another model")
    return together[int(number)]


def _replace_rows(weight: Tensor, tensor: Tensor, key: str) -> None:
    """Put a weight that was trained whole in the place of the base's; rows that pad it are left out."""
    if weight.shape[1:] != tensor.shape[1:] or len(tensor) < len(weight):
        raise UserError(f"{key}: has the shape {list(tensor.shape)} beside {list(weight.shape)} in the base")
    weight.copy_(tensor[: len(weight)])


def _publish(stored: StoredTensors, state: Mapping[str, Tensor], target: Path) -> None:
    common = {key: value for key, value in stored.common.items() if key != "optimizer"}
    step = int(common.get("iteration", 0))
    temporary = publish.begin(target, step)
    try:
        with warnings.catch_warnings():
            # It is said that no process group is there, which is the intention.
            warnings.simplefilter("ignore")
            objects: dict[str, Any] = {
                key: None for key in stored.index.objects if not key.startswith("rng_state")
            }
            if objects:
                reader = ShardReader(stored.path, stored.index)
                dcp.load(objects, storage_reader=reader, no_dist=True)
            dcp.save({**state, **objects}, storage_writer=dcp.FileSystemWriter(temporary), no_dist=True)
        torch.save(common, temporary / COMMON_STATE)
        save_config(CheckpointingConfig("torch_dist", 1), str(temporary))
        files = {path.name: publish.digest_file(path) for path in sorted(temporary.iterdir())}
        publish.sync_files(sorted(temporary.iterdir()))
        manifest = stored.manifest or publish.Manifest(step, {})
        publish.publish(temporary, replace(manifest, files=files))
    except BaseException:
        publish.abandon(temporary)
        raise


def merge_into_folder(
    base: Path, adapters: Adapters, target: Path, recipe: Recipe, plan: ModelPlan, *, any_base: bool = False
) -> Rounding:
    """Write a Hugging Face folder of the base with merged weights, a tensor at a time.

    Files are copied and their updated tensors overwritten, so that everything else is the base's to the bit.

    Args:
        base: a folder with ``config.json`` and safetensors.
        adapters: whole tensors.
        target: the folder that receives it; must not exist.
        recipe: the family of the model.
        plan: of the model.
        any_base: merge into another base than that of the adapters too.

    Raises:
        UserError: the base is another one, lacks a linear, or the target exists.
    """
    entries = recipe.entries(plan)
    files = _files_by_tensor(base)

    def place_of(name: str) -> tuple[Path, str]:
        for candidate in (name, recipe.prefix + name, name.removeprefix(recipe.prefix or "\0")):
            if candidate in files:
                return files[candidate], candidate
        raise UserError(f"{base}: has no tensor {name!r}; the adapter is of another model")

    if not any_base and adapters.base:
        frozen = {place: entry for place, entry in entries.items() if place[0] not in adapters.whole}
        _check_digest(adapters, _digest_of_folder(frozen, plan, place_of), base)
    if target.exists():
        raise UserError(f"--save {target}: exists; give a folder that does not")
    changed: dict[tuple[Path, str], tuple[str, Tensor | None]] = {}
    parts: dict[str, tuple[Entry, int]] = {}
    for key in adapters.pairs:
        entry = names_of(entries, key)
        for index, source in enumerate(entry.sources):
            changed[place_of(source)] = (source, None)
            parts[source] = (entry, index)
    for key, tensor in adapters.whole.items():
        entry = names_of(entries, key.removesuffix(".weight"))
        changed[place_of(entry.sources[0])] = (entry.sources[0], tensor)
    rounding = Rounding()
    temporary = target.parent / f".{target.name}.part"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        shutil.copytree(base, temporary)
        for path in sorted({path for path, _ in changed}):
            with safe_open(path, "pt") as file, open(temporary / path.name, "r+b") as out:
                for name, stored in read_header(path).items():
                    if (path, name) not in changed:
                        continue
                    source, whole = changed[path, name]
                    weight: Tensor = file.get_tensor(name)
                    if whole is not None:
                        _replace_rows(weight, whole, source)
                    else:
                        entry, index = parts[source]
                        pair = adapters.pairs[entry.key.removesuffix(".weight")]
                        part = entry.inverse(pair.b, plan)[index]
                        update = adapters.scale * (part.float() @ pair.a.float())
                        weight = updated(weight, update, rounding, source)
                    out.seek(stored.begin)
                    out.write(weight.contiguous().view(torch.uint8).numpy().tobytes())
                out.flush()
                os.fsync(out.fileno())
        os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return rounding


def _check_digest(adapters: Adapters, total: int, base: Path) -> None:
    found = f"{total & _DIGEST_BITS:016x}"
    if adapters.base and adapters.base != found:
        raise UserError(
            f"{adapters.where}: its adapters were trained beside weights {adapters.base}, {base} has "
            f"{found}; name that base, or add --any-base"
        )


def _digest_of_folder(entries: Mapping[tuple[str, int | None], Entry], plan: ModelPlan, place_of: Any) -> int:
    total = 0
    for (key, expert), entry in entries.items():
        tensors = []
        for source in entry.sources:
            path, name = place_of(source)
            with safe_open(path, "pt") as file:
                tensors.append(file.get_tensor(name))
        total += digest_of_whole(key, entry.forward(tensors, plan), expert, plan.experts)
    return total


def _files_by_tensor(folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(dict.fromkeys(read_header(path), path))
    if not found:
        raise UserError(f"{folder}: has no safetensors; name a Hugging Face folder, or one of checkpoints")
    return found
