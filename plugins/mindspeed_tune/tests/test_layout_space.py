"""Layouts that a search tries, and what a space file changes."""

from argparse import Namespace

import pytest

from mindspeed_core.errors import UserError
from mindspeed_core.flags.flag_set import known_flags
from mindspeed_core.registry import Registry
from mindspeed_tune.candidate import (
    CONTEXT,
    EXPERT,
    LAYERS_PER_CHUNK,
    MICRO_BATCH,
    PIPELINE,
    RECOMPUTE,
    SEQUENCE,
    TENSOR,
    ZERO,
    Candidate,
)
from mindspeed_tune.layout_space import Model, layouts
from mindspeed_tune.space_file import Space, read_space

MODEL = Model(layers=8, heads=8, key_heads=2, experts=0, sequence=8192, batch=32, context_parallel=True)
GIVEN = Namespace(micro_batch_size=1)


@pytest.fixture(scope="module")
def registry():
    return Registry.discover()


def found(registry, model=MODEL, world=16, per_node=8, space=None, given=GIVEN):
    return [one.settings for one in layouts(model, given, world, per_node, space or Space(), registry)]


def values(candidates, flag):
    return sorted({one[flag] for one in candidates if one.get(flag) is not None})


def test_sizes_divide_heads_layers_and_ranks(registry):
    candidates = found(registry)
    assert values(candidates, TENSOR) == [1, 2, 4, 8]
    assert values(candidates, PIPELINE) == [1, 2, 4, 8]
    assert values(candidates, CONTEXT) == [1, 2]
    assert all(16 % (one[TENSOR] * one[PIPELINE] * one[CONTEXT]) == 0 for one in candidates)


def test_tensor_parallelism_stays_within_a_node(registry):
    assert values(found(registry, per_node=2), TENSOR) == [1, 2]


def test_sequence_parallelism_goes_with_tensor_parallelism(registry):
    assert all(one[SEQUENCE] == (one[TENSOR] > 1) for one in found(registry))


def test_micro_batches_divide_what_a_rank_gets(registry):
    for one in found(registry):
        shards = 16 // (one[TENSOR] * one[PIPELINE] * one[CONTEXT])
        assert (32 // shards) % one[MICRO_BATCH] == 0


def test_chunks_divide_the_layers_of_a_stage(registry):
    for one in found(registry):
        if one[LAYERS_PER_CHUNK]:
            assert one[PIPELINE] > 1
            assert (8 // one[PIPELINE]) % one[LAYERS_PER_CHUNK] == 0


def test_experts_are_spread_over_ranks_that_divide_them(registry):
    model = Model(layers=8, heads=8, key_heads=8, experts=4, sequence=4096, batch=32, context_parallel=False)
    assert values(found(registry, model), EXPERT) == [1, 2, 4]


def test_what_the_command_says_stays_a_candidate(registry):
    given = Namespace(
        micro_batch_size=3,
        recompute_granularity="full",
        recompute_method="block",
        use_distributed_optimizer=False,
    )
    model = Model(layers=8, heads=8, key_heads=8, experts=0, sequence=4096, batch=48, context_parallel=False)
    candidates = found(registry, model, given=given)
    assert 3 in values(candidates, MICRO_BATCH)
    assert any(RECOMPUTE not in one for one in candidates)
    assert {one[ZERO] for one in candidates} == {False, True}


def test_a_space_narrows_and_adds_flags(registry):
    space = Space({TENSOR: (2,), RECOMPUTE: ("full",), "--use-fused-rmsnorm": (False, True)})
    candidates = found(registry, space=space)
    assert values(candidates, TENSOR) == [2]
    assert {one[RECOMPUTE] for one in candidates} == {"full"}
    assert {one["--use-fused-rmsnorm"] for one in candidates} == {False, True}


@pytest.fixture(scope="module")
def known(registry):
    return known_flags(registry)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[flags]\n'--no-such-flag' = [1]", "--no-such-flag is no flag here"),
        ("[flags]\n'--tensor-model-parallel-size' = ['two']", "'two': not a whole number"),
        ("[flags]\n'--tensor-model-parallel-size' = []", "give a list of values"),
        ("[flags]\n'--tensor-model-parallel-size' = [true]", "it takes its values"),
        ("[flags]\n'--use-flash-attn' = [2]", "it takes true or false"),
        ("[flags]\n'--recompute-granularity' = ['half']", "lists a value it does not take: 'half'"),
        ("[limits]\nchunks = -1", "limits.chunks is -1; give a whole number above 0"),
        ("[limits]\nthreads = 1", "limits.threads is unknown"),
        ("[sizes]\n", "sizes is no section"),
        ("[flags", "no TOML"),
    ],
)
def test_a_wrong_space_file_is_refused_by_file_and_key(tmp_path, known, text, says):
    path = tmp_path / "space.toml"
    path.write_text(text)
    with pytest.raises(UserError, match="--tune-space") as refused:
        read_space(path, known)
    assert says in str(refused.value)
    assert str(path) in str(refused.value)


def test_settings_take_the_place_of_flags_in_every_spelling(known):
    given = ["--num-layers", "8", "--tensor-model-parallel-size=4", "--sequence-parallel", "--bf16"]
    candidate = Candidate({TENSOR: 2, SEQUENCE: False, RECOMPUTE: None, ZERO: True})
    assert candidate.arguments(given, known) == (
        "--num-layers",
        "8",
        "--bf16",
        "--tensor-model-parallel-size",
        "2",
        "--use-distributed-optimizer",
    )
