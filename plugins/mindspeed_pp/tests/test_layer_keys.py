"""Keys of layers in checkpoints that count positions without a layer."""

import pytest
from trained import PP2, set_up

from mindspeed_megatron.model_state import select
from mindspeed_pp.layer_keys import positions, renumbered
from mindspeed_testing import run_world
from mindspeed_testing.canonical import sharded_tensors

NOOP = ("--num-layers", "6", "--noop-layers", "0,3")


def test_a_layer_has_the_position_behind_those_that_are_left_out():
    assert positions(4, {0, 3}) == [1, 2, 4, 5]


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.1.mlp.linear_fc1.weight"),
        ("optimizer.state.exp_avg.decoder.layers.2.input_layernorm.weight",) * 2,
        ("mtp.layers.0.decoder_input.weight",) * 2,
        ("embedding.word_embeddings.weight",) * 2,
    ],
)
def test_only_layers_of_the_decoder_are_renumbered(key, expected):
    places = [1, 2, 2, 5] if expected == key else [1, 2, 4, 5]
    assert renumbered(key, places) == expected


def keys(flags):
    with set_up(*PP2, *flags) as run:
        chosen = select(run, {"dp_cp_group": run.pg.dp_cp}).chosen
        return {entry.key for entry in sharded_tensors(chosen)}


def test_checkpoints_name_layers_by_their_position():
    found = run_world(keys, 2, (*NOOP, "--noop-layers-keep-numbering"))
    layers = [
        {key.split(".")[2] for key in of_rank if key.startswith("decoder.layers.")} for of_rank in found
    ]
    assert layers == [{"1", "2"}, {"4", "5"}]
