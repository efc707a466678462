"""Models of every family give transformers' logits, loaded straight from the files under several layouts."""

import pytest
import torch
from loaded_logits import logits_of
from tiny_models import MODELS, make

from mindspeed_testing import run_world

TP2 = ["--tensor-model-parallel-size", "2"]
SP = [*TP2, "--sequence-parallel"]
PP2 = ["--pipeline-model-parallel-size", "2"]
EP2 = ["--expert-model-parallel-size", "2"]
ROUTED = {"qwen3-moe", "mixtral", "deepseek-v2", "deepseek-v3"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name in MODELS:
        make(name, root / name)
    return root


def difference(folder, results):
    """Return the largest difference of logits, relative to the largest logit."""
    reference = torch.load(folder / "reference.pt")["logits"]
    texts = [each for each in results if isinstance(each, str)]
    assert not texts, texts[0]
    (logits, *_) = [each for each in results if each is not None]
    assert logits.shape == reference.shape
    return float((logits - reference).abs().max() / reference.abs().max())


@pytest.fixture(scope="module")
def alone(folders):
    (found,) = run_world(logits_of, 1, [(str(folders / name), []) for name in MODELS])
    return dict(zip(MODELS, found))


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(alone, folders, name):
    assert difference(folders / name, [alone[name]]) <= 2e-5
