"""Several tensors between pipeline stages: how they are described, sent, and differentiated."""

import json
from types import SimpleNamespace

import pytest
import torch
from trained import PP2, UNTIED, distance, flags_of, initial_state, set_up, trained

from mindspeed_core.errors import UserError
from mindspeed_core.feature import hookimpl
from mindspeed_core.run import TensorSpec
from mindspeed_pp.channels import Message
from mindspeed_pp.mail import check_described
from mindspeed_pp.tensor_shapes import parse_shapes, schema_of
from mindspeed_testing import run_world

SHAPES = [
    {"name": "left", "shape": ["s", "b", 24]},
    {"name": "position", "shape": ["b", "S"], "dtype": "int32"},
    {"name": "scale", "shape": [1], "dtype": "fp32", "grad": False},
    {"name": "right", "shape": ["s", "b", 40]},
]
HALVES = (
    *("--use-multiparameter-pipeline-model-parallel", "--pipeline-tensor-shapes"),
    json.dumps(SHAPES),
)


class Halves:
    """A model whose stages hand on the hidden state in two parts, with a mask and a constant between them."""

    @hookimpl(wrapper=True)
    def build_model(self, session):
        chunks = yield
        for chunk in chunks:
            session.instances.set("halves", chunk, "set_input_tensor", joined(chunk))
            session.instances.set("halves", chunk, "forward", split(chunk))
        return chunks


def joined(chunk):
    whole = chunk.set_input_tensor

    def set_input_tensor(tensors):
        if tensors is not None and len(tensors) == 4:
            left, position, scale, right = tensors
            assert (position.dtype, position[0, 1].item(), scale.item()) == (torch.int32, 1, 1.0)
            assert not scale.requires_grad
            tensors = [torch.cat([left, right], dim=-1) * scale]
        whole(tensors)

    return set_input_tensor


def split(chunk):
    whole = chunk.forward

    def forward(tokens, *args, **named):
        output = whole(tokens, *args, **named)
        if chunk.post_process:
            return output
        s, b, _ = output.shape
        position = torch.arange(s, dtype=torch.int32).expand(b, s)
        return output[..., :24], position, torch.ones(1), output[..., 24:]

    return forward


CASES = {
    "1f1b": (),
    "interleaved": flags_of("interleaved"),
    "zbv": flags_of("zbv"),
    "sizes": ("--optimized-mbs-list", "2,3,3"),
    "again": flags_of("1f1b", "--pipeline-recompute"),
}


def all_split(cases, initial):
    found = {}
    for name, flags in cases.items():
        with set_up(*PP2, *HALVES, *flags, initial=initial, probes=[Halves()]) as run:
            found[name] = trained(run)
    return found


def compare(names):
    ((initial, alone),) = run_world(initial_state, 1, (UNTIED,))
    results = run_world(all_split, 2, {name: (UNTIED, *CASES[name]) for name in names}, initial, timeout=600)
    for name in names:
        assert results[0][name].losses == pytest.approx(alone.losses, rel=1e-6)
        assert distance(results[0][name].gradients, alone.gradients) < 1e-6, name


def test_stages_with_several_tensors_train_what_one_process_trains():
    compare(["1f1b", "zbv"])


@pytest.mark.thorough
def test_several_tensors_with_other_orders_and_sizes():
    compare(["interleaved", "sizes", "again"])


def sizes(**changes):
    args = {"seq_length": 32, "micro_batch_size": 2, **changes}
    config = {"context_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}
    return SimpleNamespace(**args), SimpleNamespace(**config, hidden_size=64, pipeline_dtype=torch.bfloat16)


def test_letters_are_sizes_of_this_rank():
    text = (
        '[{"name": "x", "shape": ["s", "b", "2*h", 3]}, {"name": "m", "shape": ["b", "S"], "dtype": "int32"}]'
    )
    args, config = sizes(pipeline_tensor_shapes=text)
    assert schema_of(args, config).tensors == (
        TensorSpec("x", (8, 2, 128, 3), torch.bfloat16, True),
        TensorSpec("m", (2, 32), torch.int32, False),
    )


def provided(args, config):
    return [TensorSpec("x", (args.seq_length, config.hidden_size), torch.float32)]


def wrong(args, config):
    return [TensorSpec("x", (1,), torch.int32)]


def test_a_function_may_describe_the_tensors():
    args, config = sizes(pipeline_tensor_shapes=f"{__name__}:provided")
    assert schema_of(args, config).tensors == tuple(provided(args, config))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (f"{__name__}:wrong", "requires_grad for floating types alone"),
        (f"{__name__}:nothing", "cannot be imported"),
        ("no.such.module:f", "cannot be imported"),
    ],
)
def test_functions_that_describe_nothing_are_refused(function, message):
    args, config = sizes(pipeline_tensor_shapes=function)
    with pytest.raises(UserError, match=message):
        schema_of(args, config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hidden", "neither JSON nor module:function"),
        ("[]", "is no list of tensors"),
        ('[{"shape": [1]}]', "has no name"),
        ('[{"name": "x"}]', "x has no shape"),
        ('[{"name": "x", "shape": ["q"]}]', "x has the size 'q'"),
        ('[{"name": "x", "shape": [0]}]', "x has the size 0"),
        ('[{"name": "x", "shape": [1], "dtype": "bool"}]', "x has the type 'bool'"),
        ('[{"name": "x", "shape": [1], "dtype": "int32", "grad": true}]', "has grad True"),
        ('[{"name": "x", "shape": [1], "device": "cpu"}]', "x has 'device'"),
        ('[{"name": "x", "shape": [1]}, {"name": "x", "shape": [1]}]', "names a tensor twice"),
    ],
)
def test_descriptions_that_cannot_be_read_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse_shapes(text)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([torch.zeros(2)], r"1 tensors, and 2 are described \(x, y\)"),
        ([torch.zeros(2), torch.zeros(4)], r"y of torch.float32 \[4\], and torch.float32 \[3\] is described"),
        ([torch.zeros(2), torch.zeros(3).double()], "y of torch.float64"),
    ],
)
def test_a_stage_that_returns_something_else_is_named_before_it_sends(tensors, message):
    specs = [TensorSpec("x", (2,), torch.float32), TensorSpec("y", (3,), torch.float32)]
    with pytest.raises(UserError, match=f"sends to stage 1, for micro-batch 4, {message}"):
        check_described(tensors, specs, Message("F", 1, 4))
