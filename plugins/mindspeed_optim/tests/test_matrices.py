"""The matrices of a model: what is one, what is several, and that they are put together again."""

from types import SimpleNamespace

import pytest
import torch

from mindspeed_core import ParameterPart
from mindspeed_optim.muon.matrices import Matrices
from mindspeed_optim.muon.options import DUPLICATED, MuonOptions

CONFIG = SimpleNamespace(
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=3,
    attention_output_gate=False,
    gated_linear_unit=True,
)


class Model(torch.nn.Module):
    def __init__(self, **config):
        super().__init__()
        self.config = SimpleNamespace(**{**vars(CONFIG), **config})


class Grouped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.num_local_experts = 2
        self.weight1 = torch.nn.Parameter(torch.arange(48.0).view(3, 16))
        self.weight2 = torch.nn.Parameter(torch.arange(24.0).view(8, 3))


def part(name, *shape, parameter=None, cut=None, group=None):
    parameter = torch.zeros(shape) if parameter is None else parameter
    return ParameterPart(parameter, name, 0, parameter.numel(), parameter.shape, cut, group)


def matrix(name, *shape, options=None, config=None, **more):
    return Matrices([Model(**(config or {}))], options or MuonOptions()).of(part(name, *shape, **more))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("embedding.word_embeddings.weight", (8, 4)),
        ("embedding.position_embeddings.weight", (8, 4)),
        ("output_layer.weight", (8, 4)),
        ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", (4,)),
    ],
)
def test_what_is_looked_up_or_has_one_dimension_is_none(name, shape):
    assert matrix(name, *shape) is None


def test_the_mark_of_an_embedding_counts_too():
    shared = torch.zeros(8, 4)
    shared.is_embedding_or_output_parameter = True
    assert matrix("some.weight", parameter=shared) is None


def test_a_router_is_a_matrix():
    assert len(matrix("decoder.layers.0.mlp.router.weight", 4, 6).split(torch.zeros(4, 6))) == 1


@pytest.mark.parametrize("gate", [False, True])
def test_query_key_and_value_of_all_groups_are_apart(gate):
    rows = 36 if gate else 24
    found = matrix("self_attention.linear_qkv.weight", rows, 5, config={"attention_output_gate": gate})
    whole = torch.arange(rows * 5.0).view(rows, 5)
    pieces = found.split(whole)
    assert [piece.shape[0] for piece in pieces] == ([12, 12, 6, 6] if gate else [12, 6, 6])
    # The first group's queries, then the second's.
    half = rows // 2
    assert torch.equal(pieces[0], torch.cat([whole[:6], whole[half : half + 6]]))
    assert torch.equal(found.join(pieces), whole)


def test_together_they_are_one():
    options = MuonOptions(split_qkv=False)
    assert len(matrix("linear_qkv.weight", 24, 5, options=options).split(torch.zeros(24, 5))) == 1


def test_a_gated_layer_is_split_where_it_is_asked_for():
    whole = torch.arange(24.0).view(8, 3)
    assert len(matrix("mlp.linear_fc1.weight", 8, 3).split(whole)) == 1
    found = matrix("mlp.linear_fc1.weight", 8, 3, options=MuonOptions(split_gated=True))
    assert [piece.shape for piece in found.split(whole)] == [(4, 3), (4, 3)]
    assert torch.equal(found.join(found.split(whole)), whole)


@pytest.mark.parametrize("gated", [False, True])
def test_experts_in_one_parameter_are_matrices_of_their_own(gated):
    model = Model()
    model.experts = Grouped()
    recognised = Matrices([model], MuonOptions(split_gated=gated))
    first, second = model.experts.weight1, model.experts.weight2
    found = recognised.of(part("experts.weight1", parameter=first, cut=1))
    pieces = found.split(first.detach())
    assert [piece.shape for piece in pieces] == ([(4, 3)] * 4 if gated else [(8, 3)] * 2)
    assert torch.equal(torch.cat(list(pieces[: len(pieces) // 2])), first.detach().view(2, 3, 8)[0].T)
    assert torch.equal(found.join(pieces), first.detach())
    # Kept as [in, out], cut by columns: each matrix is [out, in], cut by rows.
    assert found.cut == 0
    found = recognised.of(part("experts.weight2", parameter=second, cut=0))
    assert [piece.shape for piece in found.split(second.detach())] == [(3, 4)] * 2
    assert torch.equal(found.join(found.split(second.detach())), second.detach())
    assert found.cut == 1


def test_groups_of_heads_that_ranks_share_are_split_when_the_matrix_is_whole():
    group = SimpleNamespace(size=lambda: 4)
    options = MuonOptions(tp_mode=DUPLICATED)
    assert matrix("linear_qkv.weight", 6, 5, options=options, cut=0, group=group).gather_first
    group = SimpleNamespace(size=lambda: 2)
    assert not matrix("linear_qkv.weight", 12, 5, options=options, cut=0, group=group).gather_first


def test_the_cost_is_that_of_the_products():
    assert matrix("mlp.linear_fc2.weight", 4, 6).cost() == 4 * 4 * 6
