"""Attention on NPUs, on the kernels as their contracts state them, equals CPU for every kind of call."""

import pytest
import torch
from attention_kernels import UNLIMITED, compare, tensors
from hypothesis import given, settings
from hypothesis import strategies as st

LAYOUTS = ("SBH", "BSH", "BNSD", "BSND", "SBND")


@st.composite
def calls(draw):
    """A call that is not packed."""
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    groups, share = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    sq, sk = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    square = draw(st.booleans())
    shape = (2, groups * share, groups, sq, sq if square else sk, 8, draw(st.sampled_from([8, 5])))
    seed = draw(st.integers(0, 1000))
    b, n, _, sq, sk, _, _ = shape
    mode = draw(st.integers(0, 6))
    options = {"sparse_mode": mode, "scale": draw(st.sampled_from([1.0, 0.35]))}
    generator = torch.Generator().manual_seed(seed)
    if mode in (0, 4):
        pre = draw(st.sampled_from([UNLIMITED, *range(-3, 10)]))
        following = draw(st.integers(max(-3, -pre), 9))
        options |= {"pre_tokens": pre, "next_tokens": following}
    if mode in (0, 1) and draw(st.booleans()):
        size = draw(
            st.sampled_from([(sq, sk), (1, 1, sq, sk), (b, 1, sq, sk), (1, n, sq, sk), (b, n, sq, sk)])
        )
        hidden = torch.rand(size, generator=generator) < draw(st.sampled_from([0.2, 0.7]))
        options["atten_mask"] = hidden if draw(st.booleans()) else hidden.to(torch.uint8)
    if mode in (2, 3, 4) and draw(st.booleans()):
        # Modes that make their own mask look at no other one.
        options["atten_mask"] = torch.ones(64, 64, dtype=torch.bool)
    if mode in (5, 6):
        options["prefix"] = [draw(st.integers(max(0, sk - sq), sk)) for _ in range(b)]
    bias = draw(st.sampled_from(["none", "none", "tensor", "row", "slopes", "roots", "slopes of samples"]))
    if bias in ("tensor", "row"):
        size = (draw(st.sampled_from([1, b])), n, sq if bias == "tensor" else 1, sk)
        options |= {"pse": torch.randn(size, generator=generator), "pse_type": draw(st.integers(0, 1))}
    elif bias != "none":
        samples = draw(st.sampled_from([1, b]))
        size = (n,) if bias != "slopes of samples" else (samples, n)
        options |= {"pse": torch.rand(size, generator=generator), "pse_type": 3 if bias == "roots" else 2}
        options |= {"q_start_idx": [draw(st.integers(0, 5))], "kv_start_idx": [draw(st.integers(0, 5))]}
    if draw(st.integers(0, 3)) == 0:
        options["sink"] = torch.randn(n, generator=generator).to(dtype)
    if draw(st.integers(0, 5)) == 0:
        kept = torch.rand(b, n, sq, sk, generator=generator) < 0.6
        options |= {"dropout_mask": kept, "keep_prob": 0.6}
    return tensors(shape, dtype, seed), n, draw(st.sampled_from(LAYOUTS)), options


@st.composite
def packed_calls(draw):
    """A call of packed sequences."""
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    groups, share = draw(st.sampled_from([(1, 1), (2, 1), (1, 3)]))
    mode = draw(st.sampled_from([0, 1, 2, 3, 4, 6, 7, 8]))
    lengths = []
    for _ in range(draw(st.integers(1, 4))):
        sq = draw(st.integers(0, 5))
        sk = draw(st.sampled_from([sq, max(1, sq) + draw(st.integers(0, 3)), max(1, sq - 1)]))
        lengths.append((sq, sk))
    if not any(sq and sk for sq, sk in lengths):
        lengths.append((3, 4))
    queries, keys = (sum(pair[side] for pair in lengths) for side in (0, 1))
    n, seed = groups * share, draw(st.integers(0, 1000))
    ends = [
        [sum(pair[side] for pair in lengths[: index + 1]) for index in range(len(lengths))] for side in (0, 1)
    ]
    rest = draw(st.sampled_from([0, 0, 2]))
    shape = (1, n, groups, queries + rest, keys + rest, 8, 8)
    options = {"sparse_mode": mode, "actual_seq_qlen": ends[0], "actual_seq_kvlen": ends[1]}
    if rest:
        options["actual_seq_qlen"] = [*ends[0], 0]
        options["actual_seq_kvlen"] = [*ends[1], 0]
    if mode in (4, 7, 8):
        pre = draw(st.sampled_from([UNLIMITED, 20, 2]))
        options |= {"pre_tokens": pre, "next_tokens": draw(st.integers(-1, 2))}
    generator = torch.Generator().manual_seed(seed)
    if mode == 6:
        options["prefix"] = [draw(st.integers(max(0, sk - sq), sk)) for sq, sk in lengths] + [0] * bool(rest)
    full = all(sq and sk for sq, sk in lengths)
    if full and mode not in (7, 8) and draw(st.booleans()):
        kind = draw(st.integers(0, 3))
        longest = [max(pair[side] for pair in lengths) for side in (0, 1)]
        size = (n,) if kind > 1 else (draw(st.sampled_from([1, len(lengths)])), n, *longest)
        options |= {"pse": torch.rand(size, generator=generator), "pse_type": kind}
    if draw(st.integers(0, 3)) == 0:
        options["sink"] = torch.randn(n, generator=generator).to(dtype)
    return tensors(shape, dtype, seed), n, "TND", options


@settings(max_examples=200, deadline=None, derandomize=True)
@given(calls())
def test_every_call_is_that_of_cpu(drawn):
    compare(*drawn)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(packed_calls())
def test_every_packed_call_is_that_of_cpu(drawn):
    compare(*drawn)


@pytest.mark.thorough
@pytest.mark.parametrize("soc", ["910B", "910_93", "950"])
def test_thousands_of_calls_are_those_of_cpu(soc):
    @settings(max_examples=1000, deadline=None)
    @given(st.one_of(calls(), packed_calls()))
    def judge(drawn):
        compare(*drawn, soc=soc)

    judge()
