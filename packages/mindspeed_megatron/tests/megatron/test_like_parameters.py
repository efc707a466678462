"""State that is shaped like parameters is loaded by every other layout, whole or not at all."""

from importlib.metadata import version

import pytest
import torch
from packaging.version import Version
from short_runs import EP2, MOE, PP2, SHARDED, SWIGLU, TP2, training

from mindspeed_core.errors import CheckpointError
from mindspeed_core.feature import hookimpl
from mindspeed_megatron.feature_state import feature_parts, like_parameters, restore_like_parameters
from mindspeed_testing import run_world

UNTIED = ("--untie-embeddings-and-output-weights",)
EXPERTS = (*MOE, "--num-layers", "2")
MEGATRON = (*SHARDED, "--use-megatron-fsdp", "--data-parallel-sharding-strategy")


def local(tensor):
    return tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor


def expected(parameter):
    """Return the state of a parameter: a float32 tensor that its values determine."""
    return local(parameter.detach()).float() * 2 + 1


class Belonging:
    """State of every parameter, and of the norms alone."""

    def __init__(self):
        self.of_all, self.of_norms = {}, {}

    def begin(self, run, value):
        for chunk in run.model:
            for name, parameter in chunk.named_parameters():
                self.of_all[parameter] = value(parameter)
                if "layernorm" in name:
                    self.of_norms[parameter] = value(parameter)

    @hookimpl
    def checkpoint_state(self, run):
        if not self.of_all:
            self.begin(run, lambda parameter: torch.full_like(expected(parameter), float("nan")))
        some = like_parameters(run, self.of_norms, "norms.")
        return {"belonging": {"all": like_parameters(run, self.of_all, "all."), "some": some}}

    @hookimpl
    def restore_checkpoint_state(self, run, state):
        restore_like_parameters(run, self.of_all, state["belonging"]["all"])
        restore_like_parameters(run, self.of_norms, state["belonging"]["some"])


def save(folder, *flags):
    probe = Belonging()
    with training(*flags, "--save", folder, probes=(probe,)) as run:
        probe.begin(run, expected)
        run.session.call("save_checkpoint", run=run, reason="end")


def load(folder, *flags):
    """Count the loaded elements, and the wrong ones among them."""
    probe = Belonging()
    with training(*flags, "--seed", "99", "--no-load-optim", "--load", folder, probes=(probe,)) as run:
        assert run.model
        pairs = [pair for mapping in (probe.of_all, probe.of_norms) for pair in mapping.items()]
        count = sum(tensor.numel() for _, tensor in pairs)
        return count, sum(int((tensor != expected(parameter)).sum()) for parameter, tensor in pairs)


SAVED = {
    "swiglu": (*SWIGLU, *UNTIED, *TP2),
    "tied": (*SWIGLU, *TP2, "--sequence-parallel"),
    "experts": (*EXPERTS, *EP2),
    "torch": (*SWIGLU, *UNTIED, "--use-torch-fsdp2"),
}
LOADED = {
    "tp2 to dp2, distributed optimizer": ("swiglu", (*SWIGLU, *UNTIED, *SHARDED)),
    "tp2 to pp2": ("swiglu", (*SWIGLU, *UNTIED, *PP2)),
    "tp2 to pp2, tied": ("tied", (*SWIGLU, *PP2)),
    "tp2 to interleaved": (
        "swiglu",
        (*SWIGLU, *UNTIED, *PP2, "--num-layers-per-virtual-pipeline-stage", "1"),
    ),
    "tp2 to FSDP2": ("swiglu", (*SWIGLU, *UNTIED, "--use-torch-fsdp2")),
    "FSDP2 to tp2": ("torch", (*SWIGLU, *UNTIED, *TP2)),
    "ep2 to tp2": ("experts", (*EXPERTS, *TP2, "--sequence-parallel")),
}
ALONE = {
    "tp2 to one process": ("swiglu", (*SWIGLU, *UNTIED)),
    "tp2 to one process, tied": ("tied", SWIGLU),
    "ep2 to one process": ("experts", EXPERTS),
}
if Version("0.16") <= Version(version("megatron-core")) < Version("0.18"):
    # Megatron-FSDP's parts are described as 0.16 cuts them, its corrections are those up to 0.17.
    SAVED["megatron"] = (*SWIGLU, *UNTIED, *MEGATRON, "optim_grads_params")
    LOADED |= {
        "tp2 to Megatron-FSDP": ("swiglu", (*SWIGLU, *UNTIED, *MEGATRON, "optim_grads_params")),
        "tp2 to Megatron-FSDP, optimizer": ("swiglu", (*SWIGLU, *UNTIED, *MEGATRON, "optim")),
        "Megatron-FSDP to tp2": ("megatron", (*SWIGLU, *UNTIED, *TP2)),
    }


def on_two_ranks(folder):
    for name, flags in SAVED.items():
        save(f"{folder}/{name}", *flags)
    return {name: load(f"{folder}/{saved}", *flags) for name, (saved, flags) in LOADED.items()}


def on_one_rank(folder):
    return {name: load(f"{folder}/{saved}", *flags) for name, (saved, flags) in ALONE.items()}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("saved"))
    ranks = run_world(on_two_ranks, 2, folder)
    ranks += run_world(on_one_rank, 1, folder)
    return {name: [found[name] for found in ranks if name in found] for name in (*LOADED, *ALONE)}


@pytest.mark.parametrize("name", [*LOADED, *ALONE])
def test_every_value_is_loaded_by_another_layout(loaded, name):
    for count, wrong in loaded[name]:
        assert count > 10_000
        assert wrong == 0


def refusals():
    found = {}

    def refused(name, action):
        with pytest.raises(CheckpointError) as caught:
            action()
        found[name] = str(caught.value)

    probe = Belonging()
    with training(*SWIGLU, probes=(probe,)) as run:
        chunk = run.model[0].module
        first = chunk.decoder.layers[0].mlp.linear_fc1.weight
        other = torch.nn.Parameter(torch.zeros(3))
        refused("no parameter", lambda: like_parameters(run, {other: torch.zeros(3)}))
        refused("shape", lambda: like_parameters(run, {first: torch.zeros(first.shape[::-1])}))
        kept = {first: torch.zeros_like(first)}
        refused("nothing loaded", lambda: restore_like_parameters(run, kept, {}))
        name = "0.decoder.layers.0.mlp.linear_fc1.weight"
        refused("size", lambda: restore_like_parameters(run, kept, {name: torch.zeros(3)}))
        norm = {chunk.decoder.final_layernorm.weight: chunk.decoder.final_layernorm.weight.detach().clone()}
        twice = {"first": like_parameters(run, norm), "second": like_parameters(run, norm)}
        probe.checkpoint_state = None
        run.session.collect = lambda *unused, **named: [{"mine": twice}]
        refused("one key twice", lambda: feature_parts(run))
        del run.session.collect
        chunk.register_parameter("hidden", other)
        chunk.sharded_state_dict = lambda **named: {}
        refused("not described", lambda: like_parameters(run, {other: torch.zeros(3)}))
    return found


@pytest.fixture(scope="module")
def refused():
    return run_world(refusals, 1)[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no parameter", "1 of 1 tensors (of shape [3]) belong to no parameter of run.model"),
        ("shape", "decoder.layers.0.mlp.linear_fc1.weight: state of shape [64,"),
        ("nothing loaded", "holds nothing for 0.decoder.layers.0.mlp.linear_fc1.weight"),
        ("size", "[3] was loaded for"),
        ("one key twice", "feature mine: two tensors of its state have the key"),
        ("not described", "hidden: not in the model's sharded_state_dict"),
    ],
)
def test_less_or_other_than_was_handed_in_is_an_error(refused, name, message):
    assert message in refused[name]
