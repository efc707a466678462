"""A loop of one's own with a session trains what the standalone host trains with the same flags, bit for bit."""

import pytest
from own_loop import both

from mindspeed_core.testing import run_world

LLAMA = ("--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear", "--no-bias-swiglu-fusion")
KERNELS = ("--use-fused-rmsnorm", "--use-fused-swiglu", "--use-flash-attn")
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2")

ALONE = {
    "nothing": ((), ()),
    "kernels": (LLAMA, KERNELS),
    "modules by role, with a group": ((), ("--toy-groups", "--toy-attention-scale", "0.5")),
    "a built instance": ((), ("--toy-embedding-scale", "2.0")),
    "an inner optimizer": ((), ("--toy-lion",)),
    "a batch": (("--vocab-size", "16"), ("--toy-documents", "7")),
    "a loss": ((), ("--toy-token-weights", "uniform")),
    "a snapshot beside the update": ((), ("--toy-snapshot",)),
    "numbers": ((), ("--toy-numbers",)),
    "a profiler": ((), ("--profile", "--profile-step-start", "1", "--profile-step-end", "2")),
}
TOGETHER = {
    "kernels, tensor and sequence parallel": ((*TP2, *LLAMA), KERNELS),
    "gradients over another group": (TP2[:2], ("--toy-norm-gradients",)),
    "shards exchanged after the update": (TP2[:2], ("--toy-exchange-mlp",)),
    "kernels, pipeline": ((*PP2, *LLAMA), KERNELS),
    "another boundary": (PP2, ("--toy-double-boundary",)),
    "another schedule": (PP2, ("--toy-sequential-schedule",)),
    "data parallel": ((), ("--toy-groups", "--toy-snapshot")),
}


def train_all(cases):
    return {name: both(*flags) for name, flags in cases.items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    alone = {
        name: (model, (*features, "--profile-save-path", str(folder)) if name == "a profiler" else features)
        for name, (model, features) in ALONE.items()
    }
    results = {name: [result] for name, result in run_world(train_all, 1, alone)[0].items()}
    for found in run_world(train_all, 2, TOGETHER):
        for name, result in found.items():
            results.setdefault(name, []).append(result)
    return results, folder


@pytest.mark.parametrize("name", [*ALONE, *TOGETHER])
def test_the_losses_are_those_of_the_standalone_host(trained, name):
    for expected, losses, *_ in trained[0][name]:
        assert losses == expected
        assert len(set(losses)) == len(losses)
