"""Stacked weights of experts, against megatron-core's class where it exists, also in checkpoints."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import experts

from mindspeed_megatron.expert_weights import StackedWeights

PREFIX, OFFSETS = "decoder.layers.3.mlp.", ((0, 3, 8),)
SINGLE = {"singleton_local_shards": True}


def of(rank, size):
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


GROUPS = SimpleNamespace(ep=of(1, 2), expt_tp=of(1, 2), expt_dp=of(0, 1))


def config(gated, **options):
    return TransformerConfig(
        num_layers=8,
        hidden_size=8,
        num_attention_heads=2,
        num_moe_experts=4,
        moe_ffn_hidden_size=6,
        add_bias_linear=False,
        gated_linear_unit=gated,
        activation_func=torch.nn.functional.silu,
        use_cpu_initialization=True,
        perform_initialization=False,
        **options,
    )


@pytest.fixture
def theirs(monkeypatch):
    """megatron-core's class, of a rank that has the package for its products."""
    from megatron.core.transformer.moe import grouped_gemm_util

    monkeypatch.setattr(grouped_gemm_util, "grouped_gemm", object())
    return experts.GroupedMLP


def filled(kind, gated):
    module = kind(2, config(gated), pg_collection=GROUPS)
    for number, weight in enumerate(module.parameters()):
        weight.data = (torch.arange(weight.numel()) + 1000 * number).view_as(weight).float()
    return module


def written(module, metadata):
    """The shards that a checkpoint gets, by name in the state."""
    state = module.sharded_state_dict(PREFIX, OFFSETS, metadata)
    found = {}
    for name, value in state.items():
        parts = [value] if isinstance(value, ShardedObject) else list(nested_values({"": value.build()}))
        found[name] = [
            (part.key, part.global_shape, part.global_offset, part.replica_id)
            + ((part.local_shape, part.data.tolist()) if isinstance(part, ShardedTensor) else ())
            for part in parts
            if isinstance(part, (ShardedTensor, ShardedObject))
        ]
    return found


@pytest.mark.parametrize("metadata", [None, SINGLE], ids=["joint", "single"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_a_checkpoint_gets_what_megatron_cores_class_writes(theirs, gated, metadata):
    mine = written(filled(StackedWeights, gated), metadata)

    assert mine == written(filled(theirs, gated), metadata)
    assert sum(map(len, mine.values())) > 4


@pytest.mark.parametrize("metadata", [None, SINGLE], ids=["joint", "single"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_what_was_written_comes_back(gated, metadata):
    module = filled(StackedWeights, gated)
    state = module.sharded_state_dict(PREFIX, OFFSETS, metadata)
    for name in ("weight1", "weight2"):
        factory = state[PREFIX + name]
        parts = factory.build()
        loaded = _data_of(parts)

        assert torch.equal(factory.merge_fn(loaded), getattr(module, name))


def _data_of(value):
    if isinstance(value, ShardedTensor):
        return value.data
    if isinstance(value, dict):
        return {name: _data_of(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_data_of(item) for item in value]
    return getattr(value, "obj", value)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_shapes_marks_and_activation_are_those_of_megatron_cores_class(theirs, gated):
    mine, other = filled(StackedWeights, gated), filled(theirs, gated)
    rows, probs = torch.randn(5, 6 if gated else 3), torch.rand(5, 1)

    assert [(w.shape, w.dtype, w.allreduce) for w in mine.parameters()] == [
        (w.shape, w.dtype, w.allreduce) for w in other.parameters()
    ]
    # Theirs is compiled.
    torch.testing.assert_close(
        mine.activation_func_with_probs(rows, probs), other.activation_func_with_probs(rows, probs)
    )


def test_experts_gated_by_something_else_are_refused():
    other = config(True)
    other.activation_func = torch.nn.functional.relu
    with pytest.raises(ValueError, match="silu or gelu"):
        StackedWeights(2, other, pg_collection=GROUPS)
