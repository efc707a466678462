"""Weights of a Hugging Face folder in Megatron-LM's scripts: loaded by every rank, and saved as ever."""

import fake_training as fake
import pytest
import torch
from safetensors.torch import load_file

from mindspeed_core.discovery.feature_checks import declared_features
from mindspeed_core.feature import hookimpl
from mindspeed_megatron.unwrap import unwrap
from mindspeed_models.features import DECLARATIONS
from mindspeed_testing.small_llama import write_small_llama
from mindspeed_testing.worlds import run_world
from mindspeed_train import loop as _standalone  # noqa: F401 - preloads what worlds need

CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 60}
FLAGS = ("--platform", "cpu", "--use-cpu-initialization", "--transformer-impl", "local")
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")


class Loaded:
    """The weights after the load."""

    def __init__(self):
        self.weights = {}

    @hookimpl(wrapper=True)
    def load_checkpoint(self, run):
        info = yield
        self.weights = {name: each.detach().clone() for name, each in unwrap(run.model[0]).named_parameters()}
        self.path = str(info.path)
        return info


def train(folder, *flags):
    probe = Loaded()
    fake.adapt(*declared_features(DECLARATIONS), extra=(probe,))
    ran = fake.run_script(*FLAGS, *flags)
    fake.forget_run()
    losses = [line["lm loss"] for line in ran["log"] if "lm loss" in line]
    return {"losses": losses, "err": ran["err"][-2000:], "weights": probe.weights}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_small_llama(tmp_path_factory.mktemp("hf"), **CONFIG)


def test_a_script_loads_a_folder_under_other_layouts_and_trains_the_same(folder):
    (alone,) = run_world(train, 1, str(folder), "--load", str(folder))
    assert alone["losses"], alone["err"]
    saved = load_file(folder / "model.safetensors")
    loaded = alone["weights"]
    assert torch.equal(loaded["embedding.word_embeddings.weight"][:60], saved["model.embed_tokens.weight"])
    assert torch.equal(
        loaded["decoder.layers.1.mlp.linear_fc2.weight"], saved["model.layers.1.mlp.down_proj.weight"]
    )
    shared = run_world(train, 2, str(folder), "--pretrained-checkpoint", str(folder), *TP2)
    assert shared[0]["losses"] == pytest.approx(alone["losses"], abs=1e-5)
