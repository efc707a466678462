"""The older layout of MindSpeed and AscendSpeed: a file for each tensor- and pipeline-parallel rank.

Layers are numbered within their pipeline stage, gate and up projection are two tensors unless they were
merged, and the vocabulary is padded. Reading gives megatron-core's global tensors; files are read as data,
nothing in them runs.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mindspeed_core.errors import DataError
from mindspeed_megatron.tracker import TRACKER
from mindspeed_models.recipe import ModelPlan
from mindspeed_models.weights.reader import EMBEDDING, HEAD, VOCABULARY, GlobalTensors
from mindspeed_train.interface import publish

RELEASE = "release"
FILE = "model_optim_rng.pt"
GATE, UP, MERGED = "mlp.gate_proj.weight", "mlp.dense_h_to_4h.weight", "mlp.proj.weight"
FC1, _QKV = "mlp.linear_fc1.weight", "self_attention.linear_qkv.weight"
LAYER_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight", None),
    "self_attention.linear_qkv.layer_norm_bias": ("input_layernorm.bias", None),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight", None),
    "mlp.linear_fc1.layer_norm_bias": ("post_attention_layernorm.bias", None),
    _QKV: ("self_attention.query_key_value.weight", 0),
    "self_attention.linear_qkv.bias": ("self_attention.query_key_value.bias", 0),
    "self_attention.linear_proj.weight": ("self_attention.dense.weight", 1),
    "self_attention.linear_proj.bias": ("self_attention.dense.bias", None),
    FC1: (UP, 0),
    "mlp.linear_fc1.bias": ("mlp.dense_h_to_4h.bias", 0),
    "mlp.linear_fc2.weight": ("mlp.dense_4h_to_h.weight", 1),
    "mlp.linear_fc2.bias": ("mlp.dense_4h_to_h.bias", None),
}
"""Legacy name and the axis that ranks share, by the key of a layer's tensor."""
_FINAL = {
    "decoder.final_layernorm.weight": "final_layernorm.weight",
    "decoder.final_layernorm.bias": "final_layernorm.bias",
}


@dataclass(frozen=True)
class LegacyLayout:
    """Layout of a model in older files.

    Attributes:
        tensor: tensor-parallel ranks.
        pipeline: pipeline stages.
        divisible: the vocabulary is padded to a multiple of this times ``tensor``.
        merged: gate and up projection are one tensor.
        deepspeed: files of DeepSpeed, whose weights are under ``module``.
    """

    tensor: int = 1
    pipeline: int = 1
    divisible: int = 128
    merged: bool = False
    deepspeed: bool = False

    def check(self, plan: ModelPlan) -> None:
        """Refuse sizes that ranks cannot share.

        Raises:
            DataError: names both numbers.
        """
        for name, count, parts, flag in (
            ("heads", plan.heads, self.tensor, "--tensor-model-parallel-size"),
            (
                "rows of the MLP",
                plan.arguments["ffn_hidden_size"],
                self.tensor,
                "--tensor-model-parallel-size",
            ),
            ("layers", plan.layers, self.pipeline, "--pipeline-model-parallel-size"),
        ):
            if count % parts:
                raise DataError(f"{flag} {parts} does not divide the {count} {name}; choose a divisor")
        if plan.groups % self.tensor:
            raise DataError(
                f"--tensor-model-parallel-size {self.tensor} does not divide the {plan.groups} key and "
                "value heads, "
                "which the older layout needs; choose a divisor, or convert without --legacy-layout"
            )
        if plan.experts or plan.value("multi_latent_attention") or plan.value("embed_layernorm"):
            raise DataError(
                f"--legacy-layout: models of the family {plan.family} have no older layout; convert "
                "without it"
            )

    def padded(self, rows: int) -> int:
        """Return the rows of the padded vocabulary."""
        unit = self.divisible * self.tensor
        return math.ceil(rows / unit) * unit


def write_legacy(reader: GlobalTensors, plan: ModelPlan, target: Path, layout: LegacyLayout) -> Path:
    """Write a model in the older layout, one rank's file at a time.

    Returns:
        The folder of the ranks.

    Raises:
        DataError: the layout does not fit, or the target holds something already.
    """
    layout.check(plan)
    final = target / RELEASE
    if final.exists() or (target / TRACKER).exists():
        raise DataError(f"{target}: holds a checkpoint already; name another folder, or remove it")
    for pipeline in range(layout.pipeline):
        for tensor in range(layout.tensor):
            rank = _rank_folder(final, layout, tensor, pipeline)
            rank.mkdir(parents=True, exist_ok=True)
            model = _rank_model(reader, plan, layout, tensor, pipeline)
            name, state = FILE, {"checkpoint_version": 3.0, "iteration": RELEASE, "model": model}
            if layout.deepspeed:
                name = f"mp_rank_{tensor:02d}_model_states.pt"
                state = {"module": model, "dp_world_size": 1, "mp_world_size": layout.tensor}
            beside = rank / f"{name}.tmp"
            torch.save(state, beside)
            os.replace(beside, rank / name)
    publish.write_tracker(target, RELEASE)
    return final


def _rank_folder(root: Path, layout: LegacyLayout, tensor: int, pipeline: int) -> Path:
    if layout.deepspeed:
        return root
    name = f"mp_rank_{tensor:02d}"
    return root / (name if layout.pipeline == 1 else f"{name}_{pipeline:03d}")


def _rank_model(
    reader: GlobalTensors, plan: ModelPlan, layout: LegacyLayout, tensor: int, pipeline: int
) -> dict[str, Any]:
    encoder: dict[str, torch.Tensor] = {}
    language: dict[str, Any] = {"encoder": encoder}

    def part(key: str, axis: int | None, pieces: int = 1, piece: int = 0) -> torch.Tensor:
        shape = list(reader.shape(key))
        if key in VOCABULARY:
            shape[0] = layout.padded(shape[0])
        offset = [0] * len(shape)
        if axis is not None:
            whole = shape[axis] // pieces
            shape[axis] = whole // layout.tensor
            offset[axis] = piece * whole + tensor * shape[axis]
        return reader.read(key, offset, shape).clone()

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
