"""Layers that recompute: which they are, what is refused, and what happens without backward."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_core.activation import activate, prepare
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_memory.features.proofs import BLOCK, INTERLEAVED, MODEL, PP2
from mindspeed_memory.recompute.layers import Selection
from mindspeed_testing import run_world
from mindspeed_testing.model_flags import training_flags
from mindspeed_train import loop

INSTALLED = Registry.discover()
ACTIVATION = ("--recompute-activation-function",)
NORM = ("--recompute-norm",)
UNIFORM = (
    *("--recompute-granularity", "full", "--recompute-method", "uniform"),
    *("--recompute-num-layers", "1"),
)
SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules")


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(0, 20), st.integers(0, 20), st.booleans()
)
def test_every_layer_is_chosen_once_and_as_many_as_were_asked_for(layers, whole, count, per_rank):
    selection = Selection(whole, len(layers), per_rank)
    places = [(index, chunk) for chunk, number in enumerate(layers) for index in range(number)]
    as_whole = {place for place in places if selection.is_whole(*place)}
    in_part = {place for place in places if selection.is_partial(*place, count)}
    assert not as_whole & in_part
    for chunk, number in enumerate(layers):
        assert selection.whole_layers(chunk, number) == sum(place[1] == chunk for place in as_whole)
        if not per_rank:
            assert selection.whole_layers(chunk, number) == min(whole, number)
            assert sum(place[1] == chunk for place in in_part) == min(count, max(0, number - whole))
    if per_rank and len({*layers}) == 1:
        assert len(as_whole) == min(whole, len(places))
        assert len(in_part) == min(count, len(places) - len(as_whole))
        # Chunks take turns: none has two more than another.
        shares = [selection.whole_layers(chunk, number) for chunk, number in enumerate(layers)]
        assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize(("whole", "shares"), [(2, [1, 1]), (3, [2, 1]), (0, [0, 0]), (9, [2, 2])])
def test_chunks_of_a_rank_take_turns(whole, shares):
    selection = Selection(whole, 2, per_rank=True)
    assert [selection.whole_layers(chunk, 2) for chunk in (0, 1)] == shares


def plan(*flags):
    line = training_flags(flags, 1, INSTALLED)
    return prepare(line, platform="cpu", registry=INSTALLED, host="standalone").plan


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((*ACTIVATION, *UNIFORM), "no layer is left; use --recompute-method block"),
        ((*NORM, *UNIFORM), "no layer is left; use --recompute-method block"),
        (
            ("--recompute-activation-function-num-layers", "1"),
            "-num-layers 1 needs --recompute-activation-function; add it",
        ),
        (("--recompute-norm-num-layers", "1"), "--recompute-norm-num-layers 1 needs --recompute-norm"),
        ((*NORM, "--recompute-norm-num-layers", "-1"), "-num-layers -1 is no number of layers"),
        (
            (*ACTIVATION, *SELECTIVE, "mlp", "--disable-bias-linear"),
            "--recompute-activation-function with --recompute-modules mlp is redundant",
        ),
        (
            (*NORM, *SELECTIVE, "layernorm"),
            "--recompute-norm with --recompute-modules layernorm is redundant",
        ),
        (("--enable-recompute-layers-per-pp-rank", *UNIFORM), "there is no number to count; use"),
        (("--reduce-recompute-for-last-chunk", *UNIFORM), "set --recompute-method block"),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(flags, message):
    with pytest.raises(PlanError) as error:
        plan(*flags)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "flag", ["--enable-recompute-layers-per-pp-rank", "--reduce-recompute-for-last-chunk"]
)
def test_a_count_without_a_number_of_layers_is_held_back(flag):
    made = plan(flag)
    (held,) = made.held_back
    assert "recompute-layers-per-pp-rank" not in made.names
    assert (held.name, held.flag) == ("recompute-layers-per-pp-rank", flag)
    assert held.reason == "no number of layers is given that it could count"


def test_a_number_beyond_the_layers_is_noted():
    (note,) = plan(*NORM, "--recompute-norm-num-layers", "5").notes
    assert "--recompute-norm-num-layers 5: the model has 4 layers" in str(note)


def checkpoints(*flags):
    """Train a step; return how many layers each chunk computed again, and what layers were told."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    from mindspeed_megatron.unwrap import unwrap

    with activate(
        training_flags((*MODEL, *flags), 1, INSTALLED), platform="cpu", host="standalone"
    ) as session:
        run = loop.setup(session)
        blocks = [unwrap(chunk).decoder for chunk in run.model]
        assert all(isinstance(block, TransformerBlock) for block in blocks)
        chosen = [
            (
                block.config.recompute_num_layers,
                [layer.recompute_pre_mlp_layernorm for layer in block.layers],
                ["forward" in vars(layer.mlp) for layer in block.layers],
                {layer.config.recompute_num_layers for layer in block.layers},
            )
            for block in blocks
        ]
        session.call("train_step", run=run)
        loop.teardown(session)
    return chosen


def count_all():
    parts = (*ACTIVATION, "--recompute-activation-function-num-layers", "1", *NORM)
    per_rank = "--enable-recompute-layers-per-pp-rank"
    spared = "--reduce-recompute-for-last-chunk"
    return {
        "per rank": checkpoints(*INTERLEAVED, *BLOCK, "1", per_rank, *parts),
        "per chunk": checkpoints(*INTERLEAVED, *parts),
        "spared": checkpoints(*PP2, *BLOCK, "2", spared),
        "not covered": checkpoints(*PP2, *BLOCK, "1", spared),
    }


@pytest.fixture(scope="module")
def counted():
    return run_world(count_all, 2)


def test_layers_of_a_rank_are_counted_over_its_chunks(counted):
    for rank in counted:
        first, second = rank["per rank"]
        assert first == (1, [False], [False], {1})
        assert second == (0, [True], [True], {1})


def test_layers_of_a_chunk_are_counted_within_it(counted):
    for rank in counted:
        assert [chunk[1:3] for chunk in rank["per chunk"]] == [([True], [True])] * 2


def test_the_last_layer_of_the_model_is_spared_where_it_was_chosen(counted):
    assert [rank["spared"][0][0] for rank in counted] == [2, 1]
    assert [rank["not covered"][0][0] for rank in counted] == [1, 1]


def forward_alone():
    """Run a layer without gradients, in evaluation, and with frozen weights; return what was emptied."""
    from mindspeed_megatron.unwrap import unwrap

    flags = training_flags(
        (*MODEL, "--hidden-dropout", "0", "--attention-dropout", "0", *ACTIVATION, *NORM), 1, INSTALLED
    )
    found = {}
    with activate(flags, platform="cpu", host="standalone") as session:
        run = loop.setup(session)
        layer = unwrap(run.model[0]).decoder.layers[0]
        x = torch.randn(4, 1, 64)
        with torch.no_grad():
            expected = layer.eval()(x, None)[0]
            found["evaluation"] = layer(x, None)[0].equal(expected)
            layer.train()
            found["no gradients"] = layer(x, None)[0].equal(expected)
        for parameter in layer.parameters():
            parameter.requires_grad_(False)
        emptied = []
        hook = layer.mlp.linear_fc2.register_forward_hook(
            lambda module, args, output: emptied.append(args[0])
        )
        frozen = layer(x, None)[0]
        hook.remove()
        found["frozen"] = frozen.equal(expected), emptied[0].untyped_storage().nbytes()
        layer(x.requires_grad_(), None)[0].sum().backward()
        found["gradient of the input"] = x.grad is not None
        loop.teardown(session)
    return found


def test_nothing_is_dropped_where_backward_does_not_come():
    found = run_world(forward_alone, 1)[0]
    assert found == {
        "evaluation": True,
        "no gradients": True,
        "frozen": (True, 4 * 256 * 4),
        "gradient of the input": True,
    }
