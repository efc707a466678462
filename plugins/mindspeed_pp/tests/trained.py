"""Short trainings of one world: several sessions, one after another, from the same weights."""

import itertools
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist

from mindspeed_core.activation import activate
from mindspeed_megatron.global_state import destroy_megatron_state
from mindspeed_pp.engine import EngineState
from mindspeed_testing import run_world
from mindspeed_testing.canonical import canonical_gradients, canonical_parameters, load_canonical
from mindspeed_testing.model_flags import training_flags
from mindspeed_train import loop

PP2, PP4 = (("--pipeline-model-parallel-size", size) for size in ("2", "4"))
UNTIED = "--untie-embeddings-and-output-weights"
BATCH = ("--micro-batch-size", "1", "--global-batch-size", "8", "--clip-grad", "0")


@dataclass
class Trained:
    """Results of one training."""

    losses: list = field(default_factory=list)
    gradients: dict = field(default_factory=dict)
    parameters: dict = field(default_factory=dict)
    alive: int = 0
    posted: int = 0
    executed: str = ""
    evaluated: float = 0.0
    drifted: dict = field(default_factory=dict)


@contextmanager
def set_up(*flags, initial=None, probes=()):
    """A run that is set up, from given weights; the process group outlives it."""
    session = activate(
        training_flags((*BATCH, *flags), 10), platform="cpu", extra_plugins=probes, host="standalone"
    )
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


def trained(run, steps=2, evaluates=False, gathers=True):
    """Train, and return what came of it; tensors, where they are gathered, on rank 0."""
    found = Trained()
    for _ in range(steps):
        result = run.session.call("train_step", run=run)
        found.losses.append(result.losses["lm loss"])
        run.iteration += 1
        run.consumed_train_samples += run.args.global_batch_size
    state = run.session.state(EngineState)
    found.alive, found.posted, found.executed = state.most_alive, state.most_posted, state.executed
    gradients, parameters = (canonical_gradients(run), canonical_parameters(run)) if gathers else (None, None)
    if gradients is not None and parameters is not None:
        found.gradients, found.parameters = dict(gradients.tensors), dict(parameters.tensors)
        found.drifted = parameters.drifted()
    if evaluates:
        found.evaluated = run.session.call("evaluate", run=run, split="valid")["lm loss"]
    return found


def initial_state(flags):
    """The weights that every training begins with, and what one process trains from them."""
    with set_up(*flags) as run:
        initial = canonical_parameters(run)
        return initial, trained(run)


def all_trained(cases, initial):
    """Train every case of ``name -> flags``."""
    found = {}
    for name, flags in cases.items():
        with set_up(*flags, initial=initial) as run:
            found[name] = trained(run)
    return found


def world(cases, ranks, *model):
    """Train every case on ``ranks``; returns what one process trains, and per case what each rank found."""
    ((initial, alone),) = run_world(initial_state, 1, model)
    results = run_world(all_trained, ranks, {n: (*model, *f) for n, f in cases.items()}, initial, timeout=600)
    return alone, {name: [rank[name] for rank in results] for name in cases}


def distance(one, other):
    """Largest relative difference of two sets of tensors."""
    assert one.keys() == other.keys()
    return max(float((one[key] - other[key]).abs().max() / (other[key].abs().max() + 1e-12)) for key in one)


def flags_of(name, *further):
    """The flag of a schedule, and as many chunks as it wants where it leaves them to the user."""
    chunks = ("--num-virtual-stages-per-pipeline-rank", "2")
    several = name in ("interleaved", "zbi", "nanopipe", "fold-aiao", "fold-fifo")
    return ("--pipeline-schedule", name, *(chunks if several else ()), *further)


def pairs(names):
    """Every two of some names."""
    return list(itertools.combinations(names, 2))
