"""Configurations whose dimensions tensor parallelism does not divide."""

from argparse import Namespace

import pytest
from megatron.core.transformer import TransformerConfig

from mindspeed_megatron.hosts.megatron_lm.model import _for_any_partition
from mindspeed_megatron.uneven_partition import build_for_any_partition

UNEVEN = {
    "num_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": 3,
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
}


def from_arguments(args, config_class):
    return (config_class or TransformerConfig)(**vars(args))


def test_megatron_core_refuses_them_by_itself():
    with pytest.raises(ValueError, match="num_attention_heads"):
        TransformerConfig(**UNEVEN)


@pytest.mark.parametrize(
    "build",
    [
        lambda values: build_for_any_partition(lambda given: TransformerConfig(**given), values),
        lambda values: _for_any_partition(from_arguments)(Namespace(**values), None),
    ],
    ids=["standalone", "megatron-lm"],
)
@pytest.mark.parametrize("experts", [None, 1])
def test_they_get_the_sizes_that_were_asked_for(build, experts):
    config = build({**UNEVEN, "expert_tensor_parallel_size": experts})
    assert (config.tensor_model_parallel_size, config.sequence_parallel) == (2, True)
    assert config.expert_tensor_parallel_size == (experts or 2)
    assert (config.num_query_groups, config.kv_channels) == (3, 16)
