"""Composed numbers against dry runs of the layouts themselves, over everything that a search varies.

What agrees is stated here; what does not must be found out by a search and run directly.
"""

import shlex

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
    RECOMPUTE,
    TENSOR,
    ZERO,
)
from mindspeed_tune.hardware import read_hardware
from mindspeed_tune.journal import Journal
from mindspeed_tune.launch_command import read_command
from mindspeed_tune.layout_space import ALGORITHM
from mindspeed_tune.search import Search
from mindspeed_tune.space_file import LIMITS, Space
from mindspeed_tune.trust import SECONDS_APART
from mindspeed_tune.warm_process import WarmProcess

MODEL = (
    "mindspeed-train --fake-world-size 8 --mock-data --num-layers 8 --hidden-size 512 "
    "--num-attention-heads 8 --seq-length 512 --vocab-size 4096 --max-position-embeddings 512 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --bf16 "
    "--untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 32 --train-iters 2 "
    "--lr 1e-3 --attention-dropout 0 --hidden-dropout 0 --use-flash-attn"
)
EXPERTS = (
    f"{MODEL} --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type none"
)
PLAIN = {
    TENSOR: (2,),
    PIPELINE: (1, 2, 4),
    CONTEXT: (1,),
    MICRO_BATCH: (1,),
    LAYERS_PER_CHUNK: (False,),
    ZERO: (True,),
    GRADIENT_OVERLAP: (False,),
    PARAMETER_OVERLAP: (False,),
    RECOMPUTE: (False,),
}
SPACES = {
    "plain": (MODEL, {**PLAIN, TENSOR: (1, 2)}),
    "interleaved": (MODEL, {**PLAIN, PIPELINE: (2, 4), LAYERS_PER_CHUNK: (1, 2)}),
    "overlap": (MODEL, {**PLAIN, GRADIENT_OVERLAP: (True,), PARAMETER_OVERLAP: (True,)}),
    "recomputation": (MODEL, {**PLAIN, RECOMPUTE: ("full", "selective")}),
    "micro-batches": (MODEL, {**PLAIN, PIPELINE: (1, 2), MICRO_BATCH: (1, 2, 4)}),
    "whole optimizer": (MODEL, {**PLAIN, ZERO: (False,)}),
    "rings": (MODEL, {**PLAIN, CONTEXT: (2,), ALGORITHM: ("megatron_cp_algo",), PIPELINE: (1, 2)}),
    "exchanged heads": (MODEL, {**PLAIN, CONTEXT: (2,), ALGORITHM: ("ulysses_cp_algo",), PIPELINE: (1, 2)}),
    "fetched keys": (MODEL, {**PLAIN, CONTEXT: (2,), ALGORITHM: ("kvallgather_cp_algo",), PIPELINE: (1, 2)}),
    "experts": (EXPERTS, {**PLAIN, TENSOR: (1,), EXPERT: (1, 2), EXPERT_TENSOR: (1,), PIPELINE: (1, 2)}),
}

RUN_DIRECTLY = {"interleaved": 0.01, "recomputation": 0.025}
"""Spaces in which some cells of so small a model do not agree, and by which part of the bytes at most."""


@pytest.fixture(scope="module")
def process():
    with WarmProcess() as process:
        yield process


@pytest.fixture(scope="module")
def registry():
    return Registry.discover()


@pytest.mark.thorough
@pytest.mark.parametrize("name", SPACES)
def test_composed_numbers_are_those_of_a_dry_run_or_do_not_count(name, process, registry):
    command, flags = SPACES[name]
    with Journal(None, {}) as journal:
        search = Search(
            read_command(shlex.split(command), {}),
            Space(flags, {**LIMITS, "context_tokens": 64}),
            read_hardware("h100"),
            process,
            journal,
            registry,
            trials=40,
        )
        search.run()
    assert search.ranked
    assert all(one.planned for one in search.ranked.values())
    compared = search.trust.compared
    print("\n".join(map(str, compared.values())))
    assert compared, search.unranked
    apart = {candidate: one for candidate, one in compared.items() if not one.agrees}
    assert list(map(str, apart.values())) == [] or name in RUN_DIRECTLY
    for candidate, one in apart.items():
        assert abs(one.bytes) <= RUN_DIRECTLY[name]
        assert abs(one.seconds) <= SECONDS_APART
        # A search has found it out, and only members with dry runs of their own count.
        assert "only its own dry run counts" in search.trust.why_not(search.ranked[candidate].candidate)
