"""The norm of all gradients is that of one process on every layout, and nothing waits for the device."""

from importlib.metadata import version

import pytest
import torch
from packaging.version import Version
from short_runs import BUCKETS, EP2, MOE, PP2, SHARDED, TP2, one_process, step, training
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_core.errors import SessionError
from mindspeed_core.feature import hookimpl
from mindspeed_megatron.gradient_norm import gradient_norm, squared_norm_share
from mindspeed_testing import run_world
from mindspeed_train.fault_tolerance import bad_steps

EXPERTS = (*MOE, "--num-layers", "2")
UNTIED = ("--untie-embeddings-and-output-weights",)
MEGATRON = (*SHARDED, "--use-megatron-fsdp", "--data-parallel-sharding-strategy")
LAYOUTS = {
    "dp2": ("dense", ()),
    "dp2, distributed optimizer": ("dense", BUCKETS),
    "tp2, sequence parallel": ("dense", (*TP2, "--sequence-parallel")),
    "pp2, tied embedding": ("dense", PP2),
    "interleaved, distributed optimizer": (
        "dense",
        (*PP2, *SHARDED, "--num-layers-per-virtual-pipeline-stage", "1"),
    ),
    "ep2": ("experts", EP2),
    "ep2, distributed optimizer": ("experts", (*EP2, *BUCKETS)),
    "tp2, whole experts": ("experts", (*TP2, "--sequence-parallel", "--expert-tensor-parallel-size", "1")),
    "torch's FSDP2": ("untied", ("--use-torch-fsdp2",)),
}
if Version("0.16") <= Version(version("megatron-core")) < Version("0.18"):
    # Megatron-FSDP's parts are described as 0.16 cuts them, its corrections are those up to 0.17.
    LAYOUTS |= {
        strategy: ("untied", (*MEGATRON, strategy))
        for strategy in ("no_shard", "optim", "optim_grads_params")
    }
MODELS = {"dense": (), "experts": EXPERTS, "untied": UNTIED}


class Waits(TorchDispatchMode):
    """Counts how often a value is asked from the device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


class Norms:
    """Takes the norm before each update."""

    def __init__(self):
        self.norms, self.waits, self.answers = [], [], []

    @hookimpl(wrapper=True)
    def optimizer_step(self, run):
        with Waits() as waits:
            norm = gradient_norm(run)
        self.waits.append(waits.count)
        self.norms.append(float(norm))
        with Waits() as waits:
            bad_steps._agreed_gradient(run)
        self.answers.append(waits.count)
        return (yield)


def norms_of(initial, *flags):
    probe = Norms()
    with training(*flags, initial=initial, probes=(probe,)) as run:
        theirs = [step(run).grad_norm]
    return probe.norms, theirs, probe.waits, probe.answers


def alone():
    initial = {name: one_process(*flags) for name, flags in MODELS.items()}
    return initial, {name: norms_of(initial[name], *flags) for name, flags in MODELS.items()}


def on_two_ranks(initial):
    return {
        name: norms_of(initial[model], *MODELS[model], *flags) for name, (model, flags) in LAYOUTS.items()
    }


@pytest.fixture(scope="module")
def trained():
    initial, single = run_world(alone, 1)[0]
    return single, run_world(on_two_ranks, 2, initial)


@pytest.mark.parametrize("model", MODELS)
def test_it_is_the_norm_that_megatron_core_clips_by(trained, model):
    ours, theirs, *_ = trained[0][model]
    assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_has_the_norm_of_one_process(trained, layout):
    single, ranks = trained
    for found in ranks:
        assert found[layout][0] == pytest.approx(single[LAYOUTS[layout][0]][0], rel=2e-5)
        assert found[layout][0] == pytest.approx(found[layout][1], rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_waits_for_the_device(trained, layout):
    for found in trained[1]:
        assert found[layout][2] == [0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_is_found_good_with_one_answer_from_the_device(trained, layout):
    for found in trained[1]:
        assert found[layout][3] == [1]


def unfinished():
    with training(*UNTIED, "--use-torch-fsdp2") as run, pytest.raises(SessionError, match="use-torch-fsdp2"):
        squared_norm_share(run, finished=False)


def test_gradients_before_their_reduction_are_refused_where_there_are_none():
    run_world(unfinished, 2)
