"""Over the whole space of layouts: what a search lists is what the check of a training accepts."""

import random
from dataclasses import replace

import pytest

from mindspeed_core.registry import Registry
from mindspeed_tune.candidate import (
    CONTEXT,
    EXPERT,
    EXPERT_TENSOR,
    GRADIENT_OVERLAP,
    LAYERS_PER_CHUNK,
    MICRO_BATCH,
    PARAMETER_OVERLAP,
    PIPELINE,
    SEQUENCE,
    TENSOR,
    ZERO,
    Candidate,
)
from mindspeed_tune.launch_command import read_command
from mindspeed_tune.layout_space import ALGORITHM, FULL_RECOMPUTE, INNER, Model, layouts
from mindspeed_tune.space_file import LIMITS, Space
from mindspeed_tune.validity import Validity

DRAWN = 2000
MODEL = (
    "--mock-data --num-layers 12 --hidden-size 96 --num-attention-heads 12 --seq-length 256 --vocab-size 512 "
    "--position-embedding-type rope --bf16 --micro-batch-size 1 --global-batch-size 48 --train-iters 2 "
    "--lr 1e-3 --attention-dropout 0 --use-flash-attn"
)
DENSE = f"{MODEL} --group-query-attention --num-query-groups 4"
EXPERTS = f"{MODEL} --num-experts 6 --moe-token-dispatcher-type alltoall"
SPACE = Space({}, {**LIMITS, "context_tokens": 32})
PER_NODE = 8


@pytest.fixture(scope="module")
def registry():
    return Registry.discover()


def written(candidate):
    """Return the flags that a candidate gives, whatever their order."""
    return frozenset((f, v) for f, v in candidate.settings.items() if v is not None and v is not False)


def drawn(chosen, algorithms, experts):
    """Return settings out of all values, whether they divide anything or not."""
    tp, pp = chosen.choice((1, 1, 2, 2, 3, 4, 6, 8)), chosen.choice((1, 1, 2, 2, 3, 4, 5, 6))
    cp = chosen.choice((1, 1, 1, 2, 4))
    zero, overlap = chosen.random() < 0.7, chosen.random() < 0.5
    algorithm = chosen.choice(algorithms) if cp > 1 else None
    settings = {
        TENSOR: tp,
        SEQUENCE: tp > 1,
        PIPELINE: pp,
        CONTEXT: cp,
        ALGORITHM: algorithm,
        INNER: 2 if "hybrid" in str(algorithm) else None,
        MICRO_BATCH: chosen.choice((1, 2, 4, 8)),
        LAYERS_PER_CHUNK: chosen.choice((None, None, None, 1, 2, 3)),
        ZERO: zero,
        GRADIENT_OVERLAP: overlap,
        PARAMETER_OVERLAP: overlap and zero,
        **(FULL_RECOMPUTE if chosen.random() < 0.5 else {}),
    }
    if experts:
        settings |= {EXPERT: chosen.choice((1, 2, 3, 4)), EXPERT_TENSOR: chosen.choice((1, tp))}
    return Candidate(settings)


def within(candidate, world):
    """Return whether the space is meant to hold a candidate, in the words of its page."""
    one = candidate
    pp, chunk = one.size(PIPELINE), one.settings.get(LAYERS_PER_CHUNK)
    shards = world // (one.size(TENSOR) * pp)
    chunks = 12 // pp // chunk if chunk else 1
    return (
        one.size(TENSOR) <= PER_NODE
        # Interleaving needs a pipeline; a single chunk of a stage is the plain schedule.
        and (not chunk or (pp > 1 and 12 % (pp * chunk) == 0 and 1 < chunks <= LIMITS["chunks"]))
        # Where nothing is sharded there is nothing to shard or overlap.
        and (shards > 1 or not (one.settings[ZERO] or one.settings[GRADIENT_OVERLAP]))
    )


@pytest.mark.thorough
@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_a_drawn_layout_is_listed_exactly_when_the_check_accepts_it(registry, model):
    chosen = random.Random(37)
    algorithms = registry.features["context-parallel"].cls.tuning[ALGORITHM]
    accepted = refused = 0
    wrong = []
    for world in (12, 16, 24):
        command = replace(read_command(["mindspeed-train", *model.split()], {}), world_size=world)
        validity = Validity(registry, command, "fake")
        given = validity.args_of(Candidate())
        sizes = Model.of(given, registry)
        listed = {written(one) for one in layouts(sizes, given, world, PER_NODE, SPACE, registry)}
        for _ in range(DRAWN // 6 + 1):
            one = drawn(chosen, algorithms, experts="--num-experts" in model)
            valid = validity.args_of(one) is not None
            accepted, refused = accepted + valid, refused + (not valid)
            there = written(one) in listed
            if valid and within(one, world) and not there:
                wrong.append(f"{world} ranks: accepted, and not listed: {one.name}")
            if there and not within(one, world):
                wrong.append(f"{world} ranks: listed beyond the space: {one.name}")
    assert wrong == []
    assert accepted > 50
    assert refused > 50
