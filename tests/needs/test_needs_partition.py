"""Needs of whoever distributes dimensions that tensor parallelism does not divide."""

import pytest

from mindspeed_core.activation import prepare
from mindspeed_core.errors import ArgumentError
from mindspeed_testing.model_flags import training_flags

SIZES = {
    "heads": ("--num-attention-heads", "3", "--hidden-size", "48"),
    "groups": "--num-attention-heads 6 --hidden-size 48 --group-query-attention --num-query-groups 3".split(),
    "width": ("--ffn-hidden-size", "63"),
    "length": ("--sequence-parallel", "--seq-length", "33"),
}


@pytest.fixture
def config_of(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")

    def build(*flags):
        line = training_flags(("--tensor-model-parallel-size", "2", *flags), 1)
        with prepare([*line, "--platform", "cpu"], host="standalone") as session:
            args = session.call("validate_arguments", args=session.args, plan=session.plan)
            return args, session.call("build_transformer_config", args=args)

    return build


@pytest.mark.parametrize("size", SIZES)
def test_a_dimension_that_does_not_divide_is_left_to_the_feature_in_the_slot(config_of, size):
    with pytest.raises(ArgumentError, match=r"divis|divide"):
        config_of(*SIZES[size])
    args, config = config_of("--toy-uneven", *SIZES[size])
    assert config.tensor_model_parallel_size == config.expert_tensor_parallel_size == 2
    assert config.sequence_parallel == args.sequence_parallel == ("--sequence-parallel" in SIZES[size])
    assert config.num_attention_heads == args.num_attention_heads
    assert config.num_query_groups == (
        args.num_query_groups if size == "groups" else args.num_attention_heads
    )


def test_the_vocabulary_is_padded_without_regard_to_ranks(config_of):
    odd = ("--vocab-size", "33", "--make-vocab-size-divisible-by", "3")
    assert config_of(*odd)[0].padded_vocab_size == 36
    assert config_of("--toy-uneven", *odd)[0].padded_vocab_size == 33
