"""Fully sharded data parallelism trains like one process, and refuses what it would train wrongly."""

import pytest

SHARDED = ("--use-torch-fsdp2", "--untie-embeddings-and-output-weights")
UNTIED = ("--untie-embeddings-and-output-weights",)


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
