"""Fused attention against loops over the definition: modes, layouts, biases, dropout, sinks, gradients."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_kernels.attention.bias import alibi_slopes
from mindspeed_kernels.ops import ContractError, npu_fusion_attention, npu_fusion_attention_grad, use
from mindspeed_kernels.ops.fusion_attention import logsum_of

UNLIMITED = 2147483647


def heads(batch, n, g, sq, sk, d, dv=None, dtype=torch.float64):
    torch.manual_seed(batch + 7 * n + 11 * sq + 13 * sk)
    return (
        torch.randn(batch, n, sq, d, dtype=dtype),
        torch.randn(batch, g, sk, d, dtype=dtype),
        torch.randn(batch, g, sk, dv or d, dtype=dtype),
    )


def sees(mode, i, j, sq, sk, pre=UNLIMITED, following=UNLIMITED, prefix=0, hidden=False):
    """The table of sparse modes, spelled out for one query and one key."""
    o = sk - sq
    if mode == 0:
        return not hidden and j - i <= following and i - j <= pre
    if mode == 1:
        return not hidden
    if mode == 2:
        return j <= i
    if mode == 3:
        return j <= i + o
    if mode == 4:
        return j - (i + o) <= following and (i + o) - j <= pre
    return j <= i + o or j < prefix


def by_loops(query, key, value, visible, scale=1.0, bias=None, sink=None):
    """``visible(b, i, j)`` decides; everything else is the textbook, one row at a time."""
    batch, n, sq, _ = query.shape
    g, sk = key.shape[1], key.shape[2]
    context = query.new_zeros(batch, n, sq, value.shape[3])
    logsum = query.new_full((batch, n, sq), float("inf"))
    for b in range(batch):
        for h in range(n):
            k, v = key[b, h // (n // g)], value[b, h // (n // g)]
            for i in range(sq):
                shown = [j for j in range(sk) if visible(b, i, j)]
                if not shown and sink is None:
                    continue
                scores = query[b, h, i] @ k[shown].T * scale
                if bias is not None:
                    scores = scores + torch.stack([bias(b, h, i, j) for j in shown]) if shown else scores
                everything = scores if sink is None else torch.cat((scores, sink[h : h + 1]))
                logsum[b, h, i] = everything.logsumexp(0)
                if shown:
                    context[b, h, i] = (scores - logsum[b, h, i]).exp() @ v[shown]
    return context, logsum


def agrees(result, expected, rtol=1e-7, atol=1e-9):
    torch.testing.assert_close(result[0], expected[0], rtol=rtol, atol=atol)
    torch.testing.assert_close(logsum_of(result[1], result[2])[..., 0], expected[1], rtol=rtol, atol=atol)


BANDS = [(UNLIMITED, UNLIMITED), (2, 0), (0, 3), (3, -1), (-1, 4), (1, 1)]


@pytest.mark.parametrize("backend", ["reference", "blocks"])
@pytest.mark.parametrize(("sq", "sk"), [(6, 6), (5, 8), (8, 5)])
@pytest.mark.parametrize("mode", range(7))
def test_modes_see_what_the_table_says(mode, sq, sk, backend):
    query, key, value = heads(2, 4, 2, sq, sk, 3)
    torch.manual_seed(mode)
    mask = torch.rand(2, 1, sq, sk) < 0.4
    prefix = [max(0, sk - sq), sk]
    for pre, following in BANDS if mode in (0, 4) else BANDS[:1]:
        options = {"sparse_mode": mode, "pre_tokens": pre, "next_tokens": following, "scale": 0.7}
        if mode in (0, 1):
            options["atten_mask"] = mask
        if mode in (5, 6):
            options["prefix"] = prefix

        def visible(b, i, j, pre=pre, following=following):
            hidden = mode in (0, 1) and bool(mask[b, 0, i, j])
            return sees(mode, i, j, sq, sk, pre, following, prefix[b], hidden)

        with use(npu_fusion_attention=backend):
            got = npu_fusion_attention(query, key, value, 4, "BNSD", **options)
        agrees(got, by_loops(query, key, value, visible, 0.7))


@pytest.mark.parametrize("mode", [0, 1])
def test_without_a_mask_everything_is_visible(mode):
    query, key, value = heads(1, 2, 1, 4, 5, 3)
    got = npu_fusion_attention(query, key, value, 2, "BNSD", sparse_mode=mode, pre_tokens=0, next_tokens=0)
    agrees(got, by_loops(query, key, value, lambda b, i, j: True))


def test_rows_that_see_nothing_are_zero_and_pass_no_gradient():
    query, key, value = (tensor.requires_grad_() for tensor in heads(1, 2, 2, 6, 3, 4))
    result = npu_fusion_attention(query, key, value, 2, "BNSD", sparse_mode=3)
    assert result[0][:, :, :3].abs().max() == 0
    assert result[2][:, :, :3].abs().max() == 0
    assert (result[1][:, :, :3] == torch.finfo(torch.float64).min).all()
    result[0].sum().backward()
    assert query.grad[:, :, :3].abs().max() == 0
    assert all(torch.isfinite(tensor.grad).all() for tensor in (query, key, value))


@pytest.mark.parametrize("layout", ["SBH", "BSH", "BNSD", "BSND", "SBND", "bsnd"])
def test_layouts_hold_the_same_attention(layout):
    query, key, value = heads(2, 4, 2, 5, 7, 6, 3)
    orders = {"BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3), "SBND": (2, 0, 1, 3)}
    name = layout.upper()

    def lay(tensor):
        if name in orders:
            return tensor.permute(orders[name])
        return tensor.permute(orders[name[:2] + "ND"]).flatten(2)

    expected = npu_fusion_attention(query, key, value, 4, "BNSD", sparse_mode=3)
    got = npu_fusion_attention(lay(query), lay(key), lay(value), 4, layout, sparse_mode=3)
    torch.testing.assert_close(got[0], lay(expected[0]))
    assert got[1].shape == (2, 4, 5, 8)
    torch.testing.assert_close(got[1], expected[1])


def packed(lengths, n=2, g=1, d=4, dtype=torch.float64):
    torch.manual_seed(len(lengths))
    queries, keys = (sum(pair[side] for pair in lengths) for side in (0, 1))
    ends = [[sum(p[side] for p in lengths[: i + 1]) for i in range(len(lengths))] for side in (0, 1)]
    tensors = (
        torch.randn(queries, n, d, dtype=dtype),
        torch.randn(keys, g, d, dtype=dtype),
        torch.randn(keys, g, d, dtype=dtype),
    )
    return tensors, {"actual_seq_qlen": ends[0], "actual_seq_kvlen": ends[1]}


@pytest.mark.parametrize("mode", [0, 2, 3, 4, 6, 7, 8])
def test_packed_sequences_are_those_sequences_one_by_one(mode):
    lengths = [(3, 3), (0, 2), (4, 6), (1, 1), (5, 5)]
    tensors, ends = packed(lengths)
    band = {"pre_tokens": 2, "next_tokens": 0} if mode in (4, 7, 8) else {}
    prefix = [max(0, sk - sq) for sq, sk in lengths]
    extra = {"prefix": prefix} if mode == 6 else {}
    got = npu_fusion_attention(*tensors, 2, "TND", sparse_mode=mode, **band, **ends, **extra)
    rows = columns = 0
    for index, (sq, sk) in enumerate(lengths):
        alone = {7: 4 if index == 4 else 3, 8: 4 if index == 0 else 2}.get(mode, mode)
        query = tensors[0][rows : rows + sq].transpose(0, 1)[None]
        key, value = (t[columns : columns + sk].transpose(0, 1)[None] for t in tensors[1:])
        rows, columns = rows + sq, columns + sk
        if not sq:
            continue
        own = {"prefix": [prefix[index]]} if mode == 6 else {}
        expected = npu_fusion_attention(
            query, key, value, 2, "BNSD", sparse_mode=alone, **(band if alone == 4 else {}), **own
        )
        torch.testing.assert_close(got[0][rows - sq : rows], expected[0][0].transpose(0, 1))
        torch.testing.assert_close(got[1][rows - sq : rows], expected[1][0].transpose(0, 1))


@pytest.mark.parametrize("backend", ["reference", "blocks"])
@pytest.mark.parametrize("kind", [0, 1])
def test_a_bias_is_added_before_or_after_scaling(kind, backend):
    query, key, value = heads(2, 2, 1, 4, 5, 3)
    pse = torch.randn(1, 2, 4, 5, dtype=torch.float64)
    factor = 0.5 if kind == 1 else 1.0
    with use(npu_fusion_attention=backend):
        got = npu_fusion_attention(query, key, value, 2, "BNSD", pse=pse, pse_type=kind, scale=0.5)
    expected = by_loops(
        query, key, value, lambda b, i, j: True, 0.5, lambda b, h, i, j: pse[0, h, i, j] * factor
    )
    agrees(got, expected)


@pytest.mark.parametrize("backend", ["reference", "blocks"])
@pytest.mark.parametrize("kind", [2, 3])
def test_slopes_bias_by_the_distance_of_positions(kind, backend):
    query, key, value = heads(2, 2, 2, 4, 4, 3)
    slopes = torch.tensor(alibi_slopes(2))

    def bias(b, h, i, j):
        distance = abs(i + 5 - j - 2)
        return -slopes[h].double() * (distance if kind == 2 else math.sqrt(distance))

    with use(npu_fusion_attention=backend):
        got = npu_fusion_attention(
            *(query, key, value, 2, "BNSD"),
            pse=slopes,
            pse_type=kind,
            sparse_mode=2,
            q_start_idx=[5],
            kv_start_idx=[2],
        )
    agrees(got, by_loops(query, key, value, lambda b, i, j: j <= i, 1.0, bias))


def test_a_compressed_bias_equals_the_full_one():
    size = 1100
    query, key, value = heads(1, 1, 1, size, size, 2, dtype=torch.float32)
    full = -0.01 * (torch.arange(size)[:, None] - torch.arange(size)).abs().float()[None, None]
    options = {"pse_type": 0, "sparse_mode": 2}
    expected = npu_fusion_attention(query, key, value, 1, "BNSD", pse=full, **options)
    got = npu_fusion_attention(query, key, value, 1, "BNSD", pse=full[:, :, -1024:], **options)
    torch.testing.assert_close(got[0], expected[0])


@pytest.mark.parametrize("backend", ["reference", "blocks"])
def test_a_sink_takes_weight_and_gives_no_value(backend):
    query, key, value = heads(1, 4, 2, 5, 5, 3)
    sink = torch.randn(4, dtype=torch.float64)
    with use(npu_fusion_attention=backend):
        got = npu_fusion_attention(query, key, value, 4, "BNSD", sparse_mode=2, sink=sink)
    agrees(got, by_loops(query, key, value, lambda b, i, j: j <= i, sink=sink))


def gradients(call, tensors):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    result = call(*leaves)[0]
    weight = torch.randn(result.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (result * weight.to(result.dtype)).sum().backward()
    return [leaf.grad for leaf in leaves]


CASES = {
    "causal": {"sparse_mode": 2},
    "late causal": {"sparse_mode": 3},
    "band": {"sparse_mode": 4, "pre_tokens": 3, "next_tokens": 1},
    "prefix": {"sparse_mode": 6, "prefix": [5, 9]},
    "slopes": {"pse": torch.tensor(alibi_slopes(4)), "pse_type": 2},
}


@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize(("sq", "sk"), [(9, 9), (7, 9)])
def test_blocks_have_the_gradients_of_the_reference(case, sq, sk):
    tensors = heads(2, 4, 2, sq, sk, 5, 4)
    found = []
    for backend in ("reference", "blocks"):
        with use(npu_fusion_attention=backend):
            found.append(
                gradients(
                    lambda q, k, v: npu_fusion_attention(q, k, v, 4, "BNSD", scale=0.4, **CASES[case]),
                    tensors,
                )
            )
    torch.testing.assert_close(found[1], found[0])


def test_the_reference_has_exact_gradients_of_bias_and_sink_too():
    query, key, value = heads(1, 2, 1, 3, 4, 2)
    pse = torch.randn(1, 2, 1, 4, dtype=torch.float64)
    sink = torch.randn(2, dtype=torch.float64)
    leaves = tuple(tensor.requires_grad_() for tensor in (query, key, value, pse, sink))
    for backend in ("reference", "blocks"):
        with use(npu_fusion_attention=backend):
            assert torch.autograd.gradcheck(
                lambda q, k, v, p, s: npu_fusion_attention(
                    q, k, v, 2, "BNSD", pse=p, sink=s, scale=0.5, sparse_mode=3
                )[0],
                leaves,
            )


def test_many_blocks_of_queries_give_what_one_gives():
    query, key, value = heads(1, 2, 1, 700, 700, 4, dtype=torch.float32)
    mask = torch.ones(700, 700, dtype=torch.bool).triu(1)
    found = [
        gradients(
            lambda q, k, v, options=options: npu_fusion_attention(q, k, v, 2, "BNSD", **options),
            (query, key, value),
        )
        for options in ({"sparse_mode": 2}, {"sparse_mode": 1, "atten_mask": mask})
    ]
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("backend", ["reference", "blocks"])
def test_given_dropped_weights_are_dropped(backend):
    query, key, value = heads(1, 2, 1, 4, 4, 3)
    kept = torch.rand(1, 2, 4, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    scores = query @ key.repeat_interleave(2, 1).transpose(-1, -2)
    expected = scores.softmax(-1) * kept / 0.5 @ value.repeat_interleave(2, 1)
    with use(npu_fusion_attention=backend):
        got = npu_fusion_attention(query, key, value, 2, "BNSD", keep_prob=0.5, dropout_mask=kept)
    torch.testing.assert_close(got[0], expected)


def test_random_dropout_keeps_the_mean_and_is_the_same_in_backward():
    torch.manual_seed(0)
    query, key, _ = heads(1, 1, 1, 300, 300, 4, dtype=torch.float32)
    value = torch.ones(1, 1, 300, 4, requires_grad=True)
    context = npu_fusion_attention(query, key, value, 1, "BNSD", keep_prob=0.7, sparse_mode=2)[0]
    assert abs(float(context.detach().mean()) - 1.0) < 0.05
    context.sum().backward()
    # The gradient of the values is the column sums of the weights that were kept.
    assert abs(float(value.grad.sum() - context.detach().sum())) < 1e-2


def test_dropout_follows_the_random_state():
    query, key, value = heads(1, 2, 2, 20, 20, 4)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(npu_fusion_attention(query, key, value, 2, "BNSD", keep_prob=0.5)[0])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_gradients_of_parts_of_the_keys_add_up_to_those_of_all():
    query, key, value = heads(1, 4, 2, 6, 8, 4)
    dy = torch.randn(1, 4, 6, 4, dtype=torch.float64)
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    result = npu_fusion_attention(*leaves, 4, "BNSD", scale=0.5)
    result[0].backward(dy)
    facts = {"softmax_max": result[1], "softmax_sum": result[2], "attention_in": result[0].detach()}
    parts = [
        npu_fusion_attention_grad(
            query, key[:, :, part], value[:, :, part], dy, 4, "BNSD", scale_value=0.5, **facts
        )
        for part in (slice(0, 3), slice(3, 8))
    ]
    torch.testing.assert_close(parts[0][0] + parts[1][0], leaves[0].grad)
    for index in (1, 2):
        torch.testing.assert_close(torch.cat([part[index] for part in parts], dim=2), leaves[index].grad)


def test_a_gradient_with_dropout_needs_only_the_seed_of_forward():
    query, key, value = heads(1, 2, 1, 5, 5, 4)
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    result = npu_fusion_attention(*leaves, 2, "BNSD", keep_prob=0.5)
    dy = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    result[0].backward(dy)
    with torch.no_grad():
        found = npu_fusion_attention_grad(
            *(query, key, value, dy, 2, "BNSD"),
            softmax_max=result[1],
            softmax_sum=result[2],
            attention_in=result[0],
            keep_prob=0.5,
            seed=result[4],
        )
    torch.testing.assert_close(list(found[:3]), [leaf.grad for leaf in leaves])


@settings(max_examples=20, deadline=None)
@given(
    sq=st.integers(1, 40),
    sk=st.integers(1, 40),
    ratio=st.sampled_from([1, 2, 8]),
    mode=st.sampled_from([0, 1, 2, 3, 4]),
    pre=st.integers(0, 30),
    following=st.integers(0, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_odd_sizes_and_half_precision(sq, sk, ratio, mode, pre, following, dtype):
    tensors = heads(1, ratio, 1, sq, sk, 8, dtype=dtype)
    options = {"sparse_mode": mode, "scale": 8**-0.5}
    if mode == 4:
        options |= {"pre_tokens": pre, "next_tokens": following}
    got = npu_fusion_attention(*tensors, ratio, "BNSD", **options)[0].double()
    with use(npu_fusion_attention="reference"):
        truth = npu_fusion_attention(*[t.double() for t in tensors], ratio, "BNSD", **options)[0]
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    assert float((got - truth).abs().max()) <= bound


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparse_mode": 9}, "sparse_mode must be 0 to 8, got 9; nearest supported: 8"),
        ({"sparse_mode": 7}, "sparse_mode 7 is for layout TND, got BNSD; nearest supported: 3"),
        ({"sparse_mode": 5}, "prefix must be given in sparse_mode 5, got None"),
        ({"sparse_mode": 6, "prefix": [9]}, r"prefix must be 1 to 5, got 9; nearest supported: 5"),
        ({"sparse_mode": 4, "pre_tokens": -3, "next_tokens": 1}, "pre_tokens and next_tokens must reach"),
        ({"keep_prob": 0.0}, r"keep_prob must be above 0 and at most 1, got 0\.0; nearest supported: 1\.0"),
        ({"pse_type": 4}, "pse_type must be 0 to 3, got 4; nearest supported: 3"),
        ({"atten_mask": torch.zeros(1, 5, dtype=torch.bool)}, r"atten_mask has 2 or 4 dimensions.*\(4, 5\)"),
        ({"atten_mask": torch.zeros(4, 5)}, r"atten_mask must be bool or uint8"),
        ({"pse": torch.zeros(1, 3, 4, 5)}, "pse has one bias per head and score"),
        ({"pse": torch.zeros(3), "pse_type": 2}, r"pse holds one slope per head.*nearest supported: \(2,\)"),
        ({"padding_mask": torch.zeros(1)}, "padding_mask must be None"),
        ({"head_num": 3}, "head_num is the number of heads of query, got 3; nearest supported: 2"),
        ({"input_layout": "NBSD"}, "input_layout must be one of SBH, BSH"),
        ({"dropout_mask": torch.ones(1)}, "dropout_mask has one value per score"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_nearest_choice(changes, message):
    tensors = heads(1, 2, 1, 4, 5, 3, dtype=torch.float32)
    options = {"head_num": 2, "input_layout": "BNSD", **changes}
    with pytest.raises(ContractError, match=message):
        npu_fusion_attention(*tensors, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actual_seq_qlen": None}, "actual_seq_qlen must be given in layout TND"),
        ({"actual_seq_qlen": [0, 7]}, "has as many sequences"),
        ({"actual_seq_qlen": [4, 3, 7]}, "must not decrease and end with 7"),
        ({"actual_seq_qlen": [3, 6]}, r"must not decrease and end with 7, got \[3, 6\]"),
        (
            {"actual_seq_qlen": [3, 3, 7], "actual_seq_kvlen": [3, 8, 8]},
            "sequence 2 has 4 queries and needs keys",
        ),
        ({"sparse_mode": 7, "pse": torch.zeros(2)}, "pse must be None in sparse_mode 7"),
        ({"sparse_mode": 5, "prefix": [1, 1, 1]}, "5 is not for layout TND"),
    ],
)
def test_packed_sequences_that_do_not_fit_are_refused(changes, message):
    tensors, ends = packed([(3, 3), (0, 1), (4, 4)])
    with pytest.raises(ContractError, match=message):
        npu_fusion_attention(*tensors, 2, "TND", **{"sparse_mode": 3, **ends, **changes})


def test_dropout_is_captured_in_one_graph():
    query, key, value = heads(1, 2, 1, 8, 8, 4, dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: npu_fusion_attention(q, k, v, 2, "BNSD", keep_prob=0.5, sparse_mode=2)[0],
        backend="aot_eager",
        fullgraph=True,
    )
    assert compiled(query, key, value).shape == query.shape
