"""Runs that go on with another split of the sequence, dropout on its ranks, and what a session leaves behind.

Everything is observed in one world of four ranks.
"""

import hashlib
from dataclasses import replace
from importlib.metadata import version

import pytest
from packaging.version import Version

from mindspeed_testing import run_world
from mindspeed_testing.model_flags import training_flags

ROPE = (
    *("--num-layers", "2", "--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu"),
)
LEARNED = (*ROPE, "--softmax-type", "learnable")
PREDICTIONS = ("--mtp-num-layers", "1", "--untie-embeddings-and-output-weights")
DROPPED = (
    *(*ROPE, "--hidden-dropout", "0.1", "--attention-dropout", "0.1"),
    *("--tensor-model-parallel-size", "2"),
)
NO_COPIES = tuple("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split())
ATTENTION = (*ROPE, "--attention-dropout", "0.2", "--npu-deterministic")
HYBRID = ("--context-parallel-algo", "hybrid_cp_algo", "--ulysses-degree-in-cp", "2")
LAYOUTS = {
    "ring of two": (2,),
    "heads of two": (2, "--context-parallel-algo", "ulysses_cp_algo"),
    "balanced of two, tensors cut": (
        *(2, "--context-parallel-algo", "adaptive_cp_algo"),
        *("--tensor-model-parallel-size", "2"),
    ),
    "both of four": (4, *HYBRID),
}
BLOCKERS = (
    "megatron.core.transformer.dot_product_attention:DotProductAttention",
    "megatron.core.transformer.attention:Attention.forward",
    "megatron.core.transformer.multi_latent_attention:MLASelfAttention.get_query_key_value_tensors",
    "megatron.core.models.common.embeddings.rope_utils:get_pos_emb_on_this_cp_rank",
    "megatron.core.models.common.embeddings.rotary_pos_embedding:get_pos_emb_on_this_cp_rank",
    "megatron.core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding.forward",
    "megatron.core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding.get_rotary_seq_len",
    "megatron.core.utils:get_batch_on_this_cp_rank",
    "megatron.core.utils:get_thd_batch_on_this_cp_rank",
    "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss",
    "megatron.core.pipeline_parallel.schedules:get_tensor_shapes",
    "megatron.core.transformer.multi_token_prediction:roll_tensor",
    "megatron.core.models.gpt.gpt_model:roll_tensor",
    "megatron.core.tensor_parallel.random:model_parallel_cuda_manual_seed",
    "megatron.core.parallel_state:create_hierarchical_groups",
)


def symbols():
    """The objects behind `BLOCKERS`, read where they are held; None for what a version lacks."""
    from importlib import import_module

    found = {}
    for target in BLOCKERS:
        module, _, path = target.partition(":")
        held = import_module(module)
        for name in path.split("."):
            held = vars(held).get(name)
        found[target] = held
    return found


def trained(flags, steps, *, save_to="", load_from="", saved_after=0, look=None):
    """Losses of a run in this world, saved on the way or continued; ``look`` sees the run before it ends."""
    from mindspeed_core.activation import activate
    from mindspeed_train import loop
    from mindspeed_train.arguments.run_length import batch_at
    from mindspeed_train.checkpoint import rng_state

    command = training_flags(tuple(map(str, flags)), 8)
    command += ["--save", save_to] if save_to else []
    command += ["--load", load_from] if load_from else []
    with activate(command, platform="cpu", host="standalone") as session:
        run = loop.setup(session)
        rng_state.restore(run)
        losses = []
        for step in range(steps):
            if save_to and step == saved_after:
                session.call("save_checkpoint", run=run, reason="interval")
            losses.append(session.call("train_step", run=run).losses["lm loss"])
            run.iteration += 1
            run.consumed_train_samples += batch_at(run.args, run.consumed_train_samples).samples
        seen = look(run) if look else None
        loop.teardown(session)
    return losses if look is None else (losses, seen)


def generators(run):
    """Return the rank within the sequence and within tensors, and digests of its random states."""
    from megatron.core import tensor_parallel

    states = tensor_parallel.get_cuda_rng_tracker().get_states()
    every = {"": run.session.platform.rng_state(), **states}
    digests = {name: hashlib.sha256(state.numpy().tobytes()).hexdigest() for name, state in every.items()}
    return (run.pg.cp.rank(), run.pg.tp.rank()), digests


def wrong_by_slopes(run):
    """Largest differences from attention head by head, with the slopes of the whole model's heads."""
    import torch
    from megatron.core.transformer.enums import AttnMaskType

    from mindspeed_cp.engine.attention import Members
    from mindspeed_cp.engine.masks import MaskRule
    from mindspeed_cp.engine.planners import Grid, layout_of
    from mindspeed_cp.modules.batch import SplitBatch
    from mindspeed_cp.modules.core_attention import SplitCoreAttention
    from mindspeed_cp.options import cp_options
    from mindspeed_kernels.attention.bias import alibi_slopes

    length, heads, slopes = 32, 6, alibi_slopes(6)
    generator = torch.Generator().manual_seed(5)
    query, key, value = (torch.randn(length, 2, heads, 8, generator=generator) for _ in range(3))
    distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
    by_head = []
    for head, slope in enumerate(slopes):
        scores = torch.einsum("ibd,jbd->bij", query[:, :, head], key[:, :, head]) / 8**0.5
        scores = (scores - slope * distance.abs()).masked_fill(distance < 0, float("-inf"))
        by_head.append(torch.einsum("bij,jbd->ibd", scores.softmax(-1), value[:, :, head]))
    expected = torch.stack(by_head, 2)
    here = slice(run.pg.tp.rank() * 3, run.pg.tp.rank() * 3 + 3)
    rank, rules, found = run.pg.cp.rank(), (MaskRule(length),), {}
    for name, grid, members in (
        ("ring", Grid(2), Members(rank, outer=run.pg.cp)),
        ("heads", Grid(1, 2), Members(rank, inner=run.pg.cp)),
    ):
        module = SplitCoreAttention(
            *(run.config, 1, AttnMaskType.causal, "self"),
            pg_collection=run.pg,
            options=replace(cp_options(run.args), grid=grid),
            members=lambda members=members: members,
            slopes=slopes,
        ).eval()
        mine = torch.from_numpy(layout_of(grid, rules).positions(rank))
        parts = (tensor[mine][:, :, here] for tensor in (query, key, value))
        output = module(*parts, None, packed_seq_params=SplitBatch(rules=rules))
        found[name] = float((output.view(len(mine), 2, 3, 8) - expected[mine][:, :, here]).abs().max())
    return found


def observed(folder):
    from mindspeed_testing.leak_check import ProcessState

    split = ("--context-parallel-size",)
    found = {}
    # The first run also loads what is loaded when it is first needed.
    found["undisturbed"] = trained((*LEARNED, *split, 2), 4, save_to=f"{folder}/plain", saved_after=2)
    before, objects = ProcessState.now(), symbols()

    def replaced(run):
        return [name for name, held in symbols().items() if held is not objects[name]]

    found["continued at 1"] = trained((*LEARNED, *split, 1), 2, load_from=f"{folder}/plain")
    found["continued at 4"], found["replaced"] = trained(
        (*LEARNED, *split, 4), 2, load_from=f"{folder}/plain", look=replaced
    )
    if Version(version("megatron-core")) >= Version("0.16"):
        *_, found["replaced for predictions"] = trained((*ROPE, *PREDICTIONS, *split, 2), 1, look=replaced)
    found["left"] = ProcessState.now().left_since(before)
    found["dropped"], found["own states"] = trained(
        (*DROPPED, *split, 2), 4, save_to=f"{folder}/dropped", saved_after=2, look=generators
    )
    found["dropped again"] = trained((*DROPPED, *split, 2), 2, load_from=f"{folder}/dropped")
    found["recomputed"] = trained((*DROPPED, *NO_COPIES, *split, 2), 2)
    *_, (found["same states"], found["wrong by slopes"]) = trained(
        (*DROPPED, "--no-cp-distinct-dropout", *split, 2),
        1,
        look=lambda run: (generators(run), wrong_by_slopes(run)),
    )
    found["layouts"] = {name: trained((*ATTENTION, *split, *layout), 2) for name, layout in LAYOUTS.items()}
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_world(observed, 4, str(tmp_path_factory.mktemp("checkpoints")), timeout=250)


@pytest.mark.parametrize("size", [1, 4])
def test_a_checkpoint_goes_on_with_another_split(ranks, size):
    found = ranks[0]
    assert found[f"continued at {size}"] == pytest.approx(found["undisturbed"][2:], rel=1e-6)


def test_no_symbol_of_megatron_is_replaced_while_a_sequence_is_split(ranks):
    assert [found["replaced"] for found in ranks] == [[]] * 4


def test_predictions_replace_the_shift_by_one_position_and_nothing_else(ranks):
    shift = [name for name, held in symbols().items() if held and name.endswith(":roll_tensor")]
    assert [found["replaced for predictions"] for found in ranks] == [shift] * 4


def test_a_closed_session_leaves_no_attribute_behind(ranks):
    assert [found["left"] for found in ranks] == [[]] * 4


def test_ranks_of_a_sequence_drop_other_hidden_states(ranks):
    own = dict(found["own states"] for found in ranks)
    assert all(own[0, 0][name] != own[1, 0][name] for name in ("", "model-parallel-rng"))
    alike = dict(found["same states"] for found in ranks)
    assert all(alike[0, tensors] == alike[1, tensors] for tensors in (0, 1))


def test_ranks_that_share_a_tensors_hidden_states_drop_the_same(ranks):
    own = dict(found["own states"] for found in ranks)
    for part in (0, 1):
        assert own[part, 0][""] == own[part, 1][""]
        assert own[part, 0]["model-parallel-rng"] != own[part, 1]["model-parallel-rng"]


def test_dropped_hidden_states_go_on_exactly_from_a_checkpoint(ranks):
    assert ranks[0]["dropped again"] == ranks[0]["dropped"][2:]


def test_recomputed_layers_drop_what_they_dropped_before(ranks):
    assert ranks[0]["recomputed"] == ranks[0]["dropped"][:2]


def test_attention_drops_the_same_weights_in_every_layout(ranks):
    reference, *others = (ranks[0]["layouts"][name] for name in LAYOUTS)
    for losses in others:
        assert losses == pytest.approx(reference, rel=1e-6)


@pytest.mark.parametrize("algorithm", ["ring", "heads"])
def test_biases_by_distance_have_the_slopes_of_the_whole_models_heads(ranks, algorithm):
    assert max(found["wrong by slopes"][algorithm] for found in ranks) < 1e-5
