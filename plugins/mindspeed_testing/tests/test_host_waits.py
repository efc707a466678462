"""On a device, the host waits as often in a step of many micro-batches as in one of a single one."""

import pytest

from mindspeed_core.activation import prepare
from mindspeed_core.discovery.host import DEFAULT_HOST
from mindspeed_testing import run_world
from mindspeed_testing.model_flags import training_flags
from mindspeed_train import loop
from mindspeed_train.fault_tolerance import bad_steps

MODEL = (
    *("--num-layers", "2", "--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm"),
    *("--position-embedding-type", "rope", "--bf16", "--use-distributed-optimizer"),
)
KERNELS = (
    *("--use-fused-rmsnorm", "--use-fused-swiglu", "--use-fused-rotary-pos-emb", "--use-flash-attn"),
    *("--use-fused-cross-entropy", "--use-fused-adam", "--use-gradient-accumulation-fusion"),
)
OVERLAPPED = (*KERNELS, "--overlap-grad-reduce", "--overlap-param-gather")
SIDES = {
    "without features": ((), 1),
    "with the fastest kernels": (KERNELS, 1),
    "overlapped on two ranks": (OVERLAPPED, 2),
}
"""Flags and ranks."""
BATCHES = (1, 3)
"""Micro-batches of a rank."""
NO_WAITS = {
    "megatron/core/tensor_parallel/random.py": "compares states of the host's generator, in its own memory",
    "megatron/core/optimizer/optimizer.py": "reads step counts of torch's Adam, in the host's memory",
}
"""Reads of megatron-core that a device has no part in, though the lagging one follows them."""


def waits_of(flags):
    with prepare([*training_flags(flags, 4)], host=DEFAULT_HOST, platform="lagging") as session:
        run = loop.setup(session)
        session.call("start_run", run=run)
        # What is made once is made in the first step.
        for _ in range(2):
            waits = session.platform.lagging_device.host.waits
            waits.clear()
            session.call("train_step", run=run)
            run.iteration += 1
            run.consumed_train_samples += run.args.global_batch_size
        found = {line: count for line, count in waits.items() if line.split(":")[0] not in NO_WAITS}
        loop.teardown(session)
    return found


def counted(flags, ranks):
    # The lagging device's tensors are those of a CPU, whose losses are known at once.
    bad_steps.known_at_once = lambda run: False
    return [waits_of((*MODEL, *flags, "--global-batch-size", str(ranks * batch))) for batch in BATCHES]


@pytest.mark.parametrize("side", SIDES)
def test_micro_batches_wait_for_nothing(side):
    flags, ranks = SIDES[side]
    for single, several in run_world(counted, ranks, flags, ranks):
        # A step ends with a wait for the device: something was counted.
        assert several == single != {}
