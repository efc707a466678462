"""Writing of the older layout, one rank's file at a time; the result gets its name when all are there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from mindspeed_core.errors import DataError
from mindspeed_megatron.tracker import TRACKER
from mindspeed_models.recipe import ModelPlan
from mindspeed_models.weights.hf_files import shown
from mindspeed_models.weights.legacy import (
    FC1,
    FILE,
    GATE,
    LAYER_NAMES,
    MERGED,
    RELEASE,
    UP,
    LegacyLayout,
    part_of,
)
from mindspeed_models.weights.legacy_pipe import is_piped, piped_names, rank_file, rank_state
from mindspeed_models.weights.reader import EMBEDDING, HEAD, GlobalTensors
from mindspeed_train.interface import publish

DEEPSPEED_TRACKER = "latest"
_FINAL = {
    "decoder.final_layernorm.weight": "final_layernorm.weight",
    "decoder.final_layernorm.bias": "final_layernorm.bias",
}


def write_legacy(reader: GlobalTensors, plan: ModelPlan, target: Path, layout: LegacyLayout) -> Path:
    """Write a model in the older layout, one rank's file at a time.

    Returns:
        The folder of the ranks.

    Raises:
        DataError: the layout does not fit, or the target holds something already.
    """
    layout.check(plan)
    _check_names(reader, plan)
    final = target / RELEASE
    if final.exists() or _names_another(target / TRACKER):
        raise DataError(f"{target}: holds a checkpoint already; name another folder, or remove it")
    # It gets its name when all ranks are there; what a killed process has left is begun anew.
    beside = target / f".{RELEASE}.converting"
    shutil.rmtree(beside, ignore_errors=True)
    for pipeline in range(layout.pipeline):
        for tensor in range(layout.tensor):
            path, state = _rank_file(reader, plan, layout, tensor, pipeline)
            (beside / path).parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, beside / path)
    publish.sync_files(sorted(path for path in beside.rglob("*") if path.is_file()))
    if is_piped(plan):
        # DeepSpeed looks there for the name of the folder.
        publish.write_synced(target / DEEPSPEED_TRACKER, RELEASE)
    publish.write_tracker(target, RELEASE)
    os.replace(beside, final)
    publish.sync_directory(target)
    return final


def _check_names(reader: GlobalTensors, plan: ModelPlan) -> None:
    """Refuse a model that has tensors without a name in the older layout, rather than leave them out."""
    layers = (f"decoder.layers.{layer}.{suffix}" for layer in range(plan.layers) for suffix in LAYER_NAMES)
    known = set(piped_names(plan)) if is_piped(plan) else {EMBEDDING, HEAD, *_FINAL, *layers}
    nameless = [key for key in reader.keys if key not in known]
    if nameless:
        raise DataError(
            f"--legacy-layout: the older layout has no names for {shown(nameless)} of the family "
            f"{plan.family}; convert without it"
        )


def _names_another(tracker: Path) -> bool:
    """Return whether a folder's tracker names something else than what a killed process did not finish."""
    return tracker.is_file() and tracker.read_text(encoding="utf-8").strip() != RELEASE


def _rank_file(
    reader: GlobalTensors, plan: ModelPlan, layout: LegacyLayout, tensor: int, pipeline: int
) -> tuple[str, dict[str, Any]]:
    """Return path and content of one rank's file."""
    if is_piped(plan):
        return rank_file(layout, tensor, pipeline), rank_state(reader, plan, layout, tensor, pipeline)
    model = _rank_model(reader, plan, layout, tensor, pipeline)
    if layout.deepspeed:
        state: dict[str, Any] = {"module": model, "dp_world_size": 1, "mp_world_size": layout.tensor}
        return f"mp_rank_{tensor:02d}_model_states.pt", state
    folder = f"mp_rank_{tensor:02d}" + ("" if layout.pipeline == 1 else f"_{pipeline:03d}")
    return f"{folder}/{FILE}", {"checkpoint_version": 3.0, "iteration": RELEASE, "model": model}


def _rank_model(
    reader: GlobalTensors, plan: ModelPlan, layout: LegacyLayout, tensor: int, pipeline: int
) -> dict[str, Any]:
    encoder: dict[str, torch.Tensor] = {}
    language: dict[str, Any] = {"encoder": encoder}

    def part(key: str, axis: int | None, pieces: int = 1, piece: int = 0) -> torch.Tensor:
        return part_of(reader, layout, tensor, key, axis, pieces, piece)

    if pipeline == 0:
        language["embedding"] = {"word_embeddings": {"weight": part(EMBEDDING, 0)}}
    if pipeline == layout.pipeline - 1:
        for key, name in _FINAL.items():
            if key in reader:
                encoder[name] = part(key, None)
        if HEAD in reader:
            language["output_layer"] = {"weight": part(HEAD, 0)}
    count = plan.layers // layout.pipeline
    for inside in range(count):
        prefix = f"decoder.layers.{pipeline * count + inside}."
        for suffix, (name, axis) in LAYER_NAMES.items():
            if prefix + suffix not in reader:
                continue
            if suffix == FC1 and plan.value("swiglu", False):
                gate, up = (part(prefix + suffix, 0, 2, piece) for piece in (0, 1))
                both = {MERGED: torch.cat([gate, up])} if layout.merged else {GATE: gate, UP: up}
                encoder.update({f"layers.{inside}.{each}": value for each, value in both.items()})
            else:
                encoder[f"layers.{inside}.{name}"] = part(prefix + suffix, axis)
    return {"language_model": language}
