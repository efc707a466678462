"""Averages written as weights: loaded under another layout, and what cannot be written is refused."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from state_runs import course, of_kind

from mindspeed_core.errors import CheckpointError
from mindspeed_optim.ema_export import export_averages
from mindspeed_optim.program import program
from mindspeed_testing.worlds import run_world

LLAMA = (
    *("--disable-bias-linear", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--swiglu"),
    "--bf16",
)
SHARDED = ("--use-distributed-optimizer",)
EMA = ("--optimizer-selection", "fused_ema_adamw", "--ema-decay", "0.5")
TP2 = ("--tensor-model-parallel-size", "2")


def save_averages(folder):
    with course(*LLAMA, *SHARDED, *EMA, "--save", folder) as run:
        run.train(2)
        run.save()
        return run.state(), run.parameters()


def save_without(folder):
    with course(*LLAMA, "--save", folder) as run:
        run.train(1)
        run.save()


def load(folder):
    with course(*LLAMA, *TP2, "--finetune", "--load", folder) as run:
        return run.parameters()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("averages")


@pytest.fixture(scope="module")
def exported(folder):
    saved, weights = run_world(save_averages, 2, str(folder / "run"), timeout=300)[0]
    done = CliRunner().invoke(program, ["ema-export", str(folder / "run"), str(folder / "averaged")])
    loaded = run_world(load, 2, str(folder / "averaged"), timeout=300)[0]
    return of_kind(saved, "ema_params"), weights, loaded, done


def test_what_is_loaded_under_another_layout_are_the_averages(exported):
    averages, weights, loaded, _ = exported
    assert loaded.keys() == weights.keys()
    # The state of an optimizer names stacked layers once, a model each by itself.
    together = torch.cat([tensor.flatten().float() for _, tensor in sorted(loaded.items())]).sort().values
    expected = torch.cat([tensor.bfloat16().flatten().float() for _, tensor in sorted(averages.items())])
    assert torch.equal(together, expected.sort().values)
    assert any(not torch.equal(loaded[key], weights[key]) for key in weights)


def test_it_says_how_many_weights_are_averages(exported):
    done = exported[3]
    assert done.exit_code == 0, done.output
    assert "averaged weights" in done.output


def test_a_checkpoint_without_averages_is_refused(folder):
    run_world(save_without, 1, str(folder / "adam"), timeout=300)
    with pytest.raises(CheckpointError, match="holds no averaged weights"):
        export_averages(folder / "adam", folder / "nothing")
    assert not (folder / "nothing").exists()


def test_an_empty_folder_and_the_same_one_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        export_averages(tmp_path, tmp_path / "other")
    with pytest.raises(CheckpointError, match="give another folder"):
        export_averages(tmp_path, Path(f"{tmp_path}/../{tmp_path.name}"))
