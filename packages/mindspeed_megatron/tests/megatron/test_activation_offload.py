"""megatron-core's own offloading of activations on a device whose copies are late, beside dropped results."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from mindspeed_core.activation import prepare
from mindspeed_core.feature import hookimpl
from mindspeed_testing import run_world
from mindspeed_testing.model_flags import training_flags
from mindspeed_train import loop

STEPS = 3
MODEL = (
    *("--hidden-dropout", "0.1", "--num-layers", "3", "--swiglu", "--normalization", "RMSNorm"),
    *("--position-embedding-type", "rope", "--global-batch-size", "2", "--use-flash-attn"),
)
DROPPING = ("--recompute-norm", "--recompute-activation-function")
MODULES = ("attn_norm", "mlp_norm", "qkv_linear", "core_attn", "attn_proj")
CASES = {
    "nothing": ((), ()),
    "what is brought back late": (("qkv_linear",), ()),
    "every output": (MODULES, ()),
    "outputs that are dropped": (MODULES, DROPPING),
}
INPUT = 32 * 64 * 4


class Offloading:
    """Switches it on in the configuration, as a program of the user's does, and reads its own count."""

    def __init__(self, modules):
        self.modules, self.moved = modules, {}

    @hookimpl(wrapper=True)
    def build_transformer_config(self):
        config = yield
        config.fine_grained_activation_offloading = bool(self.modules)
        config.offload_modules = [*self.modules]
        config.min_offloaded_tensor_size = 1
        return config

    @hookimpl(wrapper=True)
    def train_step(self):
        result = yield
        if self.modules:
            from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

            self.moved = dict(getattr(PipelineOffloadManager.get_instance(), "offload_summary_bytes", {}))
        return result


def trained(modules, flags):
    probe, losses = Offloading(modules), []
    line = training_flags((*MODEL, *flags), STEPS)
    with prepare(line, host="standalone", platform="lagging", extra_plugins=(probe,)) as session:
        run = loop.setup(session)
        session.call("start_run", run=run)
        for _ in range(STEPS):
            result = session.call("train_step", run=run)
            run.iteration += 1
            run.consumed_train_samples += 2
            losses.append(result.losses["lm loss"])
        loop.teardown(session)
    return losses, probe.moved


def on_this_device():
    """Answer the question for tensors of the type cuda, which newer versions ask; this device is a CPU."""
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import ChunkOffloadHandler

    question = "_can_manage_tensor_for_offload"
    if not hasattr(ChunkOffloadHandler, question):
        return nullcontext()
    answer = staticmethod(lambda tensor: not isinstance(tensor, torch.nn.Parameter))
    return mock.patch.object(ChunkOffloadHandler, question, answer)


def outcomes(cases):
    import megatron.core.extensions.transformer_engine as extension

    # Nothing of it is used but the switch that it sets.
    switch = SimpleNamespace(CPUOffloadEnabled=False)
    with mock.patch.object(extension, "cpu_offload", switch), on_this_device():
        return {case: trained(*CASES[case]) for case in cases}


@pytest.fixture(scope="module")
def found():
    return run_world(outcomes, 1, [*CASES], timeout=120)[0]


@pytest.mark.parametrize("case", [*CASES][1:])
def test_offloading_trains_the_same_on_a_late_device(found, case):
    assert found[case][0] == found["nothing"][0]


def test_host_buffers_are_used_again(found):
    losses, moved = found["every output"]
    assert losses == found["nothing"][0]
    assert {*MODULES} == {name for name, nbytes in moved.items() if nbytes}


def used_again():
    """Copy to the host, back, and another tensor to the same buffer there, each on its stream."""
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
        ChunkOffloadHandler,
        PipelineOffloadManager,
    )

    with prepare(training_flags(MODEL, 1), host="standalone", platform="lagging"):
        manager = PipelineOffloadManager.get_instance()
        handler = ChunkOffloadHandler(1, manager.cpu_tensor_pool)
        one, other = torch.full((8,), 1.0), torch.full((8,), 2.0)
        away, back = manager.d2h_stream, manager.h2d_stream
        away.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(away):
            first = handler.offload(one)
        back.wait_stream(away)
        with torch.cuda.stream(back):
            there = handler.reload(first)
        with torch.cuda.stream(away):
            second = handler.offload(other)
        same = second[1] is first[1]
        torch.cuda.current_stream().wait_stream(back)
        return same, there.tolist()


def test_a_host_buffer_is_written_when_it_was_read():
    ((same, values),) = run_world(used_again, 1)
    assert same
    assert values == [1.0] * 8


def test_what_is_dropped_is_not_moved(found):
    assert found["what is brought back late"][1]["qkv_linear"] == 2 * INPUT
    assert found["outputs that are dropped"][1]["qkv_linear"] == 0
