import pytest
import torch

from mindspeed_testing import run_world
from mindspeed_testing.canonical import (
    CanonicalError,
    CanonicalState,
    canonical_parameters,
    load_canonical,
)
from mindspeed_testing.compare import compare_tensors
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.training import train_side
from mindspeed_testing.worlds import WorldError

TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")
SHARDED = ("--use-distributed-optimizer",)
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
LLAMA = (
    *("--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"),
    *("--normalization", "RMSNorm", "--position-embedding-type", "rope"),
    *("--group-query-attention", "--num-query-groups", "2"),
)

LAYOUTS = [
    pytest.param((), 2, id="dp2"),
    pytest.param(SHARDED, 2, id="dp2-distributed-optimizer"),
    pytest.param((*SHARDED, *OVERLAP, "--ddp-bucket-size", "20000"), 2, id="dp2-overlap-buckets"),
    pytest.param(TP2, 2, id="tp2"),
    pytest.param((*TP2, "--sequence-parallel"), 2, id="tp2-sp"),
    pytest.param(PP2, 2, id="pp2"),
    pytest.param((*PP2, "--num-layers-per-virtual-pipeline-stage", "1"), 2, id="vpp2"),
    pytest.param((*TP2, *PP2), 4, id="tp2-pp2"),
    pytest.param((*TP2, "--sequence-parallel", *SHARDED), 4, id="tp2-sp-dp2-distributed-optimizer"),
]


@pytest.mark.parametrize(("flags", "size"), LAYOUTS)
def test_every_layout_trains_like_a_single_process(mindspeed_equivalence, flags, size):
    verdict = mindspeed_equivalence(flags, world_size=size, baseline_world_size=1)
    # 3 losses, 52 tensors: gradients of 3 steps and the parameters.
    assert verdict.compared == 3 + 4 * 52


@pytest.mark.parametrize(
    ("layout", "size"), [pytest.param(TP2, 2, id="tp2"), pytest.param((*TP2, *PP2), 4, id="tp2-pp2")]
)
def test_split_activations_and_separate_output_weights_too(mindspeed_equivalence, layout, size):
    mindspeed_equivalence((*LLAMA, *layout), LLAMA, world_size=size, baseline_world_size=1)


def test_a_tied_embedding_exists_once_under_pipeline_parallelism():
    side = train_side(PP2, 2, steps=1)
    assert "output_layer.weight" not in side.parameters.tensors
    # The copy on the last stage was compared with the first stage's.
    assert side.gradients[0].replica_error["embedding.word_embeddings.weight"] == 0.0


def loaded_and_gathered(flags, state):
    from mindspeed_core.activation import activate
    from mindspeed_train import loop

    with activate(training_flags(flags, 1), host="standalone") as session:
        run = loop.setup(session)
        load_canonical(run, state)
        main = [p for group in run.optimizer.param_groups for p in group["params"]]
        return canonical_parameters(run), sum(float(p.detach().double().sum()) for p in main)


def marked(state):
    """Other values than any initialization gives."""
    generator = torch.Generator().manual_seed(7)
    return CanonicalState({k: torch.randn(t.shape, generator=generator) for k, t in state.tensors.items()})


@pytest.fixture(scope="module")
def llama_state():
    return marked(train_side(LLAMA, 1, steps=1, gradients=False).initial)


@pytest.mark.parametrize(
    ("layout", "size"),
    [((), 1), (TP2, 2), ((*PP2, "--num-layers-per-virtual-pipeline-stage", "1"), 2), ((*TP2, *PP2), 4)],
)
def test_what_was_loaded_into_a_layout_is_gathered_from_it_bit_for_bit(llama_state, layout, size):
    state, _ = run_world(loaded_and_gathered, size, (*LLAMA, *layout), llama_state)[0]
    comparison = compare_tensors(state.tensors, llama_state.tensors, tolerance=0.0)
    assert comparison.equal, str(comparison)
    assert len(comparison.differences) == 4 * 6 + 3


def test_loading_refreshes_the_optimizers_own_copies(llama_state):
    expected = sum(float(tensor.double().sum()) for tensor in llama_state.tensors.values())
    results = run_world(loaded_and_gathered, 2, (*LLAMA, *SHARDED, "--bf16"), llama_state)
    assert sum(total for _, total in results) == pytest.approx(expected, abs=expected * 1e-2 + 5)


def test_vocabulary_padding_is_cut_and_filled():
    small = ("--vocab-size", "120")
    state = marked(train_side(small, 1, steps=1, gradients=False).initial)
    assert state.tensors["embedding.word_embeddings.weight"].shape == (120, 64)
    padded = (*small, "--make-vocab-size-divisible-by", "256")
    again, _ = run_world(loaded_and_gathered, 1, padded, state)[0]
    assert compare_tensors(again.tensors, state.tensors, tolerance=0.0).equal


def test_a_state_without_a_tensor_of_the_model_is_refused(llama_state):
    parts = dict(llama_state.tensors)
    del parts["decoder.final_layernorm.weight"]
    with pytest.raises(WorldError, match=r"the state to load lacks decoder\.final_layernorm\.weight"):
        run_world(loaded_and_gathered, 1, LLAMA, CanonicalState(parts))


def test_a_state_of_another_shape_is_refused(llama_state):
    with pytest.raises(WorldError, match=r"CanonicalError: .*: the state has shape"):
        run_world(loaded_and_gathered, 1, (*LLAMA, "--ffn-hidden-size", "320"), llama_state)


def part(offset, tensor, main=True, shape=(4,)):
    return ("w", shape, offset, tensor, main, False)


def test_elements_that_no_rank_holds_are_reported():
    from mindspeed_testing.canonical import _paste

    with pytest.raises(CanonicalError, match=r"w: of 4 elements 2 are on no rank and 0 on several"):
        _paste([[part((0,), torch.ones(2))]], 0)


def test_elements_that_two_ranks_claim_are_reported():
    from mindspeed_testing.canonical import _paste

    with pytest.raises(CanonicalError, match=r"0 are on no rank and 2 on several"):
        _paste([[part((0,), torch.ones(4))], [part((2,), torch.ones(2))]], 0)


def test_copies_that_drifted_apart_show():
    from mindspeed_testing.canonical import _paste

    state = _paste([[part((0,), torch.ones(4))], [part((2,), torch.tensor([1.0, 1.5]), main=False)]], 0)
    assert state.drifted() == {"w": pytest.approx(0.5)}
    assert state.drifted(0.6) == {}


def test_zeros_of_sixteen_bits_are_equal_on_all_ranks():
    from mindspeed_testing.canonical import _paste

    zeros = torch.zeros(4, dtype=torch.float16)
    state = _paste([[part((0,), zeros)], [part((0,), zeros, main=False)]], 0)
    assert state.drifted() == {}
