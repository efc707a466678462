"""A program with a loop of its own loads a Hugging Face folder into the model that it has built."""

import torch
from megatron.core.utils import unwrap_model
from own_loop import OwnLoop, described, of_the_batches, recorded

from mindspeed_core.activation import activate
from mindspeed_testing import run_world
from mindspeed_testing.small_llama import write_small_llama

MODEL = (
    *("--num-layers", "2", "--hidden-size", "32", "--ffn-hidden-size", "48", "--num-attention-heads", "8"),
    *("--group-query-attention", "--num-query-groups", "4", "--vocab-size", "250", "--swiglu"),
    *("--disable-bias-linear", "--normalization", "RMSNorm", "--position-embedding-type", "rope"),
    "--untie-embeddings-and-output-weights",
)


def load(folder):
    from mindspeed_models.weights.live import load_pretrained

    with recorded(*MODEL, "--load", folder) as (memory, run):
        args = run.args
    flags, configs = of_the_batches(args), described(*MODEL)[1]
    with activate(flags, platform="cpu", configs=configs) as session:
        own = OwnLoop(session, configs, memory, args, False)
        (chunk,) = unwrap_model(own.chunks)
        with torch.no_grad():
            for parameter in chunk.parameters():
                parameter.zero_()
        load_pretrained(session, folder)
        expected = memory.weights[0]
        return {name: torch.equal(each, expected[name]) for name, each in chunk.named_parameters()}


def test_the_weights_are_those_that_the_standalone_host_loads(tmp_path):
    folder = str(write_small_llama(tmp_path / "hf", num_hidden_layers=2))
    (found,) = run_world(load, 1, folder)
    assert found
    assert all(found.values()), [name for name, equal in found.items() if not equal]
