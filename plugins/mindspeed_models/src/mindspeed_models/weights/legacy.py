"""The older layout of MindSpeed and AscendSpeed: a file for each tensor- and pipeline-parallel rank.

Layers are numbered within their pipeline stage, gate and up projection are two tensors unless they were
merged, and the vocabulary is padded. Bloom has names of its own, see `legacy_pipe`. Reading gives
megatron-core's global tensors; files are read as data, nothing in them runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mindspeed_core.errors import DataError
from mindspeed_models.recipe import ModelPlan
from mindspeed_models.weights.reader import VOCABULARY, GlobalTensors

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
_OLD = "the programs that read the older layout"
_WITHOUT = {
    "num_experts": f"{_OLD} had no routed experts, and their converters no names for them",
    "multi_latent_attention": f"{_OLD} had no latent attention, and their converters no names for it",
    "qk_layernorm": f"{_OLD} had no norms of queries and keys, and their converters no names for them",
    "geglu": f"{_OLD} gated MLPs by SiLU alone",
    "scale_embedding": f"{_OLD} scaled no embedding",
    "window_size": f"{_OLD} had no sliding windows, and would attend to every token",
    "use_rope_scaling": f"{_OLD} did not scale rotary positions",
}
"""Why the older layout has no place for a model, by the argument that makes it so."""


@dataclass(frozen=True)
class LegacyLayout:
    """Layout of a model in older files.

    Attributes:
        tensor: tensor-parallel ranks.
        pipeline: pipeline stages.
        divisible: the vocabulary is padded to a multiple of this times ``tensor``.
        merged: gate and up projection are one tensor.
        deepspeed: files of DeepSpeed, whose weights are under ``module``.
        partition: layers of each stage; empty for equally many.
    """

    tensor: int = 1
    pipeline: int = 1
    divisible: int = 128
    merged: bool = False
    deepspeed: bool = False
    partition: tuple[int, ...] = ()

    def stages(self, plan: ModelPlan) -> tuple[int, ...]:
        """Return the layers of each pipeline stage."""
        return self.partition or (plan.layers // self.pipeline,) * self.pipeline

    def check(self, plan: ModelPlan) -> None:
        """Refuse sizes that ranks cannot share.

        Raises:
            DataError: names both numbers, or what the layout has no place for.
        """
        reason = next((text for name, text in _WITHOUT.items() if plan.value(name, False)), None)
        if reason is not None:
            raise DataError(
                f"--legacy-layout: {reason}, so that models of the family {plan.family} have none; convert "
                "without it"
            )
        if self.partition and (len(self.partition) != self.pipeline or sum(self.partition) != plan.layers):
            raise DataError(
                f"--partition-layers {','.join(map(str, self.partition))}: needs {self.pipeline} numbers "
                f"(--pipeline-model-parallel-size) whose sum is the {plan.layers} layers"
            )
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
            if name == "layers" and self.partition:
                continue
            if count % parts:
                raise DataError(f"{flag} {parts} does not divide the {count} {name}; choose a divisor")
        if plan.groups % self.tensor:
            raise DataError(
                f"--tensor-model-parallel-size {self.tensor} does not divide the {plan.groups} key and "
                "value heads, "
                "which the older layout needs; choose a divisor, or convert without --legacy-layout"
            )

    def padded(self, rows: int) -> int:
        """Return the rows of the padded vocabulary."""
        unit = self.divisible * self.tensor
        return math.ceil(rows / unit) * unit


def part_of(
    reader: GlobalTensors,
    layout: LegacyLayout,
    tensor: int,
    key: str,
    axis: int | None,
    pieces: int = 1,
    piece: int = 0,
) -> torch.Tensor:
    """Return a tensor-parallel rank's part of a tensor, with its share of the padding of a vocabulary.

    Args:
        reader: gives global tensors.
        layout: of the ranks.
        tensor: the rank.
        key: of the tensor.
        axis: that ranks share; None where each has all of it.
        pieces: tensors that lie behind each other on that axis.
        piece: the one that is meant.
    """
    shape = list(reader.shape(key))
    if key in VOCABULARY:
        shape[0] = layout.padded(shape[0])
    offset = [0] * len(shape)
    if axis is not None:
        whole = shape[axis] // pieces
        shape[axis] = whole // layout.tensor
        offset[axis] = piece * whole + tensor * shape[axis]
    return reader.read(key, offset, shape).clone()
