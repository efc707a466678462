"""Fully sharded data parallelism trains like one process, and refuses what it would train wrongly."""

import pytest
from test_checkpoint_resume import NO_DROPOUT, close_run, open_run, save, train

from mindspeed_core.testing.worlds import run_world

SHARDED = ("--use-torch-fsdp2", "--untie-embeddings-and-output-weights")
UNTIED = ("--untie-embeddings-and-output-weights",)
LLAMA = (
    *UNTIED,
    *"--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear".split(),
)


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        pytest.param((), 2, id="dp2"),
        pytest.param(("--torch-fsdp2-no-reshard-after-forward",), 2, id="dp2-kept-parameters"),
        pytest.param(("--tensor-model-parallel-size", "2", "--sequence-parallel"), 4, id="tp2-dp2"),
    ],
)
def test_sharded_parameters_train_like_one_process(equivalence, layout, size):
    equivalence((*SHARDED, *layout), UNTIED, world_size=size, baseline_world_size=1)


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        pytest.param((), 2, id="dp2"),
        pytest.param(("--tensor-model-parallel-size", "2", "--sequence-parallel"), 4, id="tp2-dp2"),
    ],
)
def test_gated_layers_are_cut_as_they_lie_in_memory(equivalence, layout, size):
    equivalence((*SHARDED, *LLAMA, *layout), LLAMA, world_size=size, baseline_world_size=1)


def test_a_run_resumes_bit_for_bit_and_other_layouts_take_its_weights(tmp_path):
    for results in run_world(f"{__name__}:resume_rank", 2, str(tmp_path), timeout=200):
        assert results["resumed"] == results["went on"]
        assert results["plain"] == pytest.approx(results["went on loss"], rel=1e-5)


def resume_rank(folder):
    sharded = ["--use-torch-fsdp2", *LLAMA, *NO_DROPOUT]
    run = open_run([*sharded, "--save", folder])
    train(run, 2)
    save(run)
    went_on = train(run, 2)
    close_run(run)
    run = open_run([*sharded, "--load", folder])
    resumed = train(run, 2)
    close_run(run)
    run = open_run([*LLAMA, *NO_DROPOUT, "--load", folder, "--no-load-optim", "--no-load-rng"])
    plain = float.fromhex(train(run, 1)[0][0])
    close_run(run)
    return {
        "went on": went_on,
        "resumed": resumed,
        "plain": plain,
        "went on loss": float.fromhex(went_on[0][0]),
    }
