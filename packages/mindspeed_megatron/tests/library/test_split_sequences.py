"""Split sequences in a loop of one's own: exact for every form of a loss function; groups must fit."""

import dataclasses
import runpy
from pathlib import Path

import pytest

from mindspeed_testing import run_world

EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "library" / "split_sequences.py"
STEPS = 3


def train_in_every_form():
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from mindspeed_core.errors import UserError

    dist.init_process_group("gloo")
    script = runpy.run_path(str(EXAMPLE))
    names = script["train"].__globals__
    names["STEPS"] = STEPS
    config, summed = script["model_config"], script["summed_loss"]

    def per_token(ranks):
        return dataclasses.replace(config(ranks), calculate_per_token_loss=True)

    def mean(mask, losses):
        total, tokens, report = summed(mask, losses)
        return total / torch.clamp(tokens, min=1), report

    found = {"whole": names["train"](1, {}), "sum": names["train"](2, {})}
    names["model_config"] = per_token
    found["per token"] = names["train"](2, {})
    names.update(model_config=config, summed_loss=mean)
    found["mean"] = names["train"](2, {})
    try:
        names["model_config"] = lambda ranks: config(2)
        names["train"](1, {})
    except UserError as error:
        found["other groups"] = str(error)
    parallel_state.destroy_model_parallel()
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def trained():
    return run_world(train_in_every_form, 2, timeout=200)


@pytest.mark.parametrize("form", ["sum", "per token", "mean"])
def test_losses_are_those_of_whole_sequences_though_ranks_count_different_tokens(trained, form):
    for rank in trained:
        assert len(rank[form]) == STEPS
        assert rank[form] == pytest.approx(rank["whole"], rel=1e-5)


def test_groups_of_another_size_are_refused(trained):
    assert "context-parallel groups of megatron-core have 1 ranks" in trained[0]["other groups"]
