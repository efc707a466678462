"""Ends of a model: logits of normalized rows, the norm of the embedding, z-loss; biases of attention."""

import lora_runs as runs
import pytest
import torch
from torch.nn import functional as F

from mindspeed_core.errors import SessionError, UserError
from mindspeed_testing import run_world

ENDS = {
    "head": ("--lm-norm-weight",),
    "embedding": ("--embed-layernorm",),
    "z-loss": ("--z-loss-weight", "0.5"),
    "bias": ("--row-col-parallel-linear-bias",),
}


def logits(run):
    """Logits of some tokens ``[b, s, v]``, and the hidden states ``[s, b, h]`` they are made of."""
    (model,) = run.model
    ids = torch.arange(32).reshape(1, 32) % 128
    kept = {}
    inner = model.module
    inner.output_layer.register_forward_pre_hook(lambda layer, given: kept.update(hidden=given[0]))
    inner.embedding.register_forward_hook(lambda layer, given, output: kept.update(embedded=output))
    with torch.no_grad():
        found = model(ids, torch.arange(32).reshape(1, 32), None)
    return found, kept["hidden"], kept["embedded"], ids


def ends():
    found = {}
    with runs.course(*runs.BASE, *ENDS["head"]) as run:
        made, hidden, _, _ = logits(run.run)
        weight = run.run.model[0].module.output_layer.weight
        expected = hidden @ F.normalize(weight, dim=-1).t()
        found["head"] = float((made.transpose(0, 1) - expected).abs().max())
        before = weight.detach().clone()
        run.train(1)
        # No part of a row's gradient is along the row.
        along = (weight.main_grad * before).sum(-1).abs().max() / weight.main_grad.norm()
        found["head gradient"] = float(along)
        key = "output_layer.weight"
        found["head saved"] = bool(run.parameters().tensors[key].equal(weight.detach()))
        found["head rows"] = float((weight.norm(dim=-1) - 1).abs().max())
    with runs.course(*runs.BASE, *ENDS["embedding"]) as run:
        inner = run.run.model[0].module
        with torch.no_grad():
            inner.embedding.norm.weight.normal_()
            inner.embedding.norm.bias.normal_()
        _, _, embedded, ids = logits(run.run)
        norm = inner.embedding.norm
        table = inner.embedding.word_embeddings.weight
        expected = F.layer_norm(table[ids].transpose(0, 1), (64,), norm.weight, norm.bias, 1e-5)
        found["embedding"] = float((embedded - expected).abs().max())
        found["embedding keys"] = [key for key in run.parameters().tensors if "embedding." in key]
    with runs.course(*runs.BASE) as run:
        plain = run.run.session.call("train_step", run=run.run)
        found["plain"] = dict(plain.losses), plain.grad_norm
    with runs.course(*runs.BASE, *ENDS["z-loss"]) as run:
        with_z = run.run.session.call("train_step", run=run.run)
        found["z-loss"] = dict(with_z.losses), with_z.grad_norm
    with runs.course(*runs.BASE, *ENDS["bias"]) as run:
        run.train(1)
        found["biases"] = {
            key.rpartition("layers.")[2][2:] for key in run.parameters().tensors if "bias" in key
        }
        moved = [
            bool(p.detach().ne(0).any()) for n, p in run.run.model[0].named_parameters() if n.endswith("bias")
        ]
        found["biases moved"] = all(moved)
    return found


@pytest.fixture(scope="module")
def found():
    return run_world(ends, 1)[0]


def test_logits_are_those_of_rows_of_length_one(found):
    assert found["head"] < 1e-5
    assert found["head gradient"] < 1e-4


def test_the_rows_themselves_are_trained_and_saved_as_they_are(found):
    assert found["head saved"]
    assert found["head rows"] > 0.1


def test_the_embedding_is_normalized_with_parameters_of_its_own(found):
    assert found["embedding"] < 1e-5
    assert found["embedding keys"] == [
        "embedding.word_embeddings.weight",
        "embedding.norm.weight",
        "embedding.norm.bias",
    ]


def test_z_loss_is_the_square_of_the_logarithm_and_reported_apart(found):
    (plain, plain_norm), (with_z, norm) = found["plain"], found["z-loss"]
    assert with_z["lm loss"] == pytest.approx(plain["lm loss"], rel=1e-6)
    # Logits of a new model are close to zero: Z is the size of the vocabulary.
    assert with_z["z loss"] == pytest.approx(torch.tensor(128.0).log().item() ** 2, rel=0.05)
    assert norm != plain_norm


def test_attention_has_biases_and_nothing_else(found):
    assert found["biases"] == {"self_attention.linear_qkv.bias", "self_attention.linear_proj.bias"}
    assert found["biases moved"]


class Opaque:
    """An output layer that says that its output is not the product with its weight."""

    opaque = True
    bias = None


class Chunk:
    """The part of a model that its last linear is looked for in."""

    output_layer, share_embeddings_and_output_weights, post_process = Opaque(), False, True

    def modules(self):
        return ()

    def _postprocess(self):
        """Stands for megatron-core's."""


class NoReaders:
    """The part of a session that is asked before anything changes."""

    def implementations(self, stage):
        return ["host"]

    def state(self, record):
        return record()


@pytest.mark.parametrize("flag", ["--lm-loss-chunks", "--pipeline-w-output-layer"])
def test_who_would_compute_the_product_itself_refuses_an_opaque_linear(flag):
    from mindspeed_pp.weight_gradients import change_built_linears
    from mindspeed_tp.loss_head import defer_logits

    refused = {
        "--lm-loss-chunks": lambda: defer_logits(NoReaders(), [Chunk()], 2, None),
        "--pipeline-w-output-layer": lambda: change_built_linears(
            NoReaders(), Chunk(), "pp", output_layer=True
        ),
    }
    with pytest.raises((SessionError, UserError), match=f"{flag}.* the output layer is Opaque"):
        refused[flag]()
