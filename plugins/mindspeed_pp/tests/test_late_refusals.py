"""Facts known only when the model or a batch exists: refused, or reported once, with the way out."""

import logging
from argparse import Namespace
from types import SimpleNamespace

import pytest
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from trained import set_up

from mindspeed_core.errors import SessionError, UserError
from mindspeed_megatron.layer_spec import SpecEditor
from mindspeed_megatron.spec_forms import as_spec
from mindspeed_pp.engine import Engine, EngineState
from mindspeed_pp.plan import Plan
from mindspeed_pp.registry import rule_named
from mindspeed_pp.tied_embeddings import share_embedding
from mindspeed_pp.weight_gradients import place_later_linears
from mindspeed_testing import run_world


class Whole:
    """A linear of another package that has its weight gradient in backward."""


def without_splittable_linears():
    with set_up() as run:
        spec = get_gpt_layer_local_spec()
        attention, dense = spec.submodules.self_attention, as_spec(spec.submodules.mlp)
        attention.submodules.linear_qkv = attention.submodules.linear_proj = Whole
        dense.submodules.linear_fc1 = dense.submodules.linear_fc2 = Whole
        editor = SpecEditor(spec, owner="acme-whole")
        editor.replace("fc2", Whole)
        spec = editor.spec
        with pytest.raises(UserError) as error:
            place_later_linears(run.session, spec, "test")
        return str(error.value)


def test_a_model_without_splittable_linears_is_refused_with_their_names():
    (said,) = run_world(without_splittable_linears, 1)
    assert said == (
        "--pipeline-schedule: it computes gradients of weights apart, and no linear of this model can "
        "(Whole, Whole of acme-whole). Use --transformer-impl local, or the schedule 1f1b or interleaved, or "
        "drop the feature that put them there; a module around a linear says with wraps which argument holds "
        "it"
    )


def engine(name, rank=0):
    plan = Plan(rule_named(name), ranks=2, chunks=2)
    return Engine(SimpleNamespace(dist=SimpleNamespace(rank=rank)), Namespace(), None, None, plan)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_ramp_below_the_least_batch_says_once_what_takes_over(rank, caplog):
    state, ramped = EngineState(), engine("dualpipev", rank)
    with caplog.at_level(logging.WARNING, "mindspeed_core"):
        names = [ramped._schedule(count, False, state)[0].name for count in (2, 2, 3, 8)]
        ramped._schedule(2, True, state)
    assert names == ["waves", "waves", "waves", "dualpipev"]
    said = (
        "--pipeline-schedule: schedule dualpipev on 2 ranks needs at least 4 micro-batches, the batch has 2; "
        "raise --global-batch-size, or use 1f1b or interleaved; schedule waves takes over for such batches"
    )
    assert [record.getMessage() for record in caplog.records] == ([said] if rank == 0 else [])


def test_a_schedule_without_pairs_is_refused_at_its_first_batch_but_not_for_evaluation():
    state = EngineState(combined=lambda forward, backward: None)
    assert engine("dualpipev")._schedule(2, False, state)[0].name == "waves"
    assert engine("zbv")._schedule(4, True, state)[0].name == "zbv"
    with pytest.raises(
        UserError, match="--moe-fb-overlap with pipeline schedule zbv: it has no forward pass"
    ):
        engine("zbv")._schedule(4, False, state)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "predictions"])
def test_embeddings_that_one_rank_shares_refuse_a_group_of_several(tied):
    first = SimpleNamespace(pre_process=True)
    last = SimpleNamespace(pre_process=False, post_process=True, share_embeddings_and_output_weights=tied)
    last.mtp_process = not tied
    groups = SimpleNamespace(embd=SimpleNamespace(size=lambda: 2))
    with pytest.raises(SessionError, match=r"has 2; call initialize_model_parallel\(get_embedding_ranks="):
        share_embedding(None, [first, last], groups, "test")
