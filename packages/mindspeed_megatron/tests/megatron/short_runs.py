"""Short trainings of the standalone host inside a world, one after another on one process group."""

from __future__ import annotations

from contextlib import contextmanager

import torch
import torch.distributed as dist

from mindspeed_core.activation import activate
from mindspeed_megatron.global_state import destroy_megatron_state
from mindspeed_testing.canonical import canonical_parameters, load_canonical
from mindspeed_testing.model_flags import training_flags
from mindspeed_train import loop

TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")
EP2 = ("--expert-model-parallel-size", "2")
SHARDED = ("--use-distributed-optimizer",)
BUCKETS = (*SHARDED, "--overlap-grad-reduce", "--ddp-bucket-size", "20000")
OVERLAP = (*BUCKETS, "--overlap-param-gather")
MOE = tuple(
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --disable-bias-linear --swiglu".split()
)
SWIGLU = ("--swiglu", "--disable-bias-linear", "--group-query-attention", "--num-query-groups", "2")


@contextmanager
def training(*flags, initial=None, probes=()):
    """A run that is set up, from given weights where they are given."""
    session = activate(training_flags(flags, 10), platform="cpu", extra_plugins=probes, host="standalone")
    try:
        with session:
            run = loop.setup(session)
            if initial is not None:
                load_canonical(run, initial)
            yield run
            if dist.is_initialized():
                dist.barrier()
    finally:
        destroy_megatron_state()


def step(run):
    """One training step, counted as the loop counts it."""
    result = run.session.call("train_step", run=run)
    run.iteration += 1
    run.consumed_train_samples += run.args.global_batch_size
    return result


def everywhere(state):
    """Return the value of rank 0 on every rank."""
    box = [state]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]


def parameters(run):
    """The unsharded parameters by name, on every rank."""
    return everywhere(canonical_parameters(run))


def one_process(*flags):
    """The weights that a single process starts from; call it in a world of one."""
    with training(*flags) as run:
        return canonical_parameters(run)


def distance(one, other):
    """Largest absolute difference of two mappings with the same tensors."""
    assert one.keys() == other.keys()
    return max(float((torch.as_tensor(one[key]) - other[key]).abs().max()) for key in one)
