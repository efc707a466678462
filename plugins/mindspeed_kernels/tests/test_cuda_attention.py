"""Fused attention on CUDA as far as it can be seen without one: arguments of torch's kernels, and shapes.

The flash kernel is stood for by its definition, so that windows, packing and widths handed to it must
describe the attention asked for. Flex attention computes on CPU what it compiles for CUDA.
"""

from itertools import pairwise

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from mindspeed_kernels.attention import cuda
from mindspeed_kernels.attention.arguments import options_of, prepare
from mindspeed_kernels.attention.bias import COMPRESSED_ROWS, alibi_slopes
from mindspeed_kernels.call import Call
from mindspeed_kernels.ops import npu_fusion_attention, npu_fusion_attention_grad
from mindspeed_kernels.ops.fusion_attention import comparable

FLASH = npu_fusion_attention.backends["flash"].function
FLEX = npu_fusion_attention.backends["flex"].function
LENGTHS = {"actual_seq_qlen": [3, 3, 8], "actual_seq_kvlen": [4, 4, 13]}
EQUAL = {"actual_seq_qlen": [3, 3, 8], "actual_seq_kvlen": [3, 3, 8]}


def heads(sq, sk, d=8, dv=8, n=4, g=2, dtype=torch.float32, packed=False):
    generator = torch.Generator().manual_seed(sq + 31 * sk)
    shapes = (
        ((sq, n, d), (sk, g, d), (sk, g, dv)) if packed else ((2, n, sq, d), (2, g, sk, d), (2, g, sk, dv))
    )
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def weights(query, key, rows, columns, band, scale):
    """Scores and visibility of one sequence as the kernel defines them: windows end at the last key."""
    q, k = query.float(), key.float().repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = torch.einsum("inx,jnx->nij", q[rows], k[columns]) * scale
    i = torch.arange(scores.shape[1])[:, None] + scores.shape[2] - scores.shape[1]
    j = torch.arange(scores.shape[2])
    seen = torch.ones(scores.shape[1:], dtype=torch.bool)
    if band.left >= 0:
        seen &= j >= i - band.left
    if band.right >= 0:
        seen &= j <= i + band.right
    return scores.masked_fill(~seen, float("-inf"))


def sequences(query, key, band):
    if band.starts[0] is None:
        return [(slice(None), slice(None))]
    rows, columns = (starts.tolist() for starts in band.starts)
    return [(slice(*r), slice(*c)) for r, c in zip(pairwise(rows), pairwise(columns))]


def known(query, key, value):
    assert query.shape[-1] % 8 == 0
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert query.shape[-2] % key.shape[-2] == 0


def kernel(query, key, value, band, dropout, scale):
    """Return what the flash kernel computes, ``[b, s, n, d]`` or packed."""
    known(query, key, value)
    assert dropout == 0.0
    if query.dim() == 4:
        found = [kernel(*parts, band, dropout, scale) for parts in zip(query, key, value)]
        return tuple(torch.stack(parts) for parts in zip(*found))
    context, logsum = torch.zeros_like(query), query.new_zeros(query.shape[1], query.shape[0]).float()
    spread = value.float().repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    for rows, columns in sequences(query, key, band):
        scores = weights(query, key, rows, columns, band, scale)
        total = scores.logsumexp(-1)
        total = total.masked_fill(total == float("-inf"), float("inf"))
        probabilities = (scores - total.unsqueeze(-1)).exp()
        context[rows] = torch.einsum("nij,jnx->inx", probabilities, spread[columns]).to(context.dtype)
        logsum[:, rows] = total
    return context, logsum


def backward(tensors, band, scale):
    """Compute what the kernel's backward computes."""
    gradient, query, key, value, context, logsum = tensors
    known(query, key, value)
    if query.dim() == 4:
        return tuple(torch.stack(p) for p in zip(*(backward(item, band, scale) for item in zip(*tensors))))
    groups = query.shape[1] // key.shape[1]
    wide_k, wide_v = (t.float().repeat_interleave(groups, dim=1) for t in (key, value))
    found = [torch.zeros_like(query), torch.zeros_like(wide_k), torch.zeros_like(wide_v)]
    for rows, columns in sequences(query, key, band):
        scores = weights(query, key, rows, columns, band, scale)
        p = (scores - logsum[:, rows, None]).exp()
        outer = gradient[rows].float()
        delta = (outer * context[rows].float()).sum(-1).T.unsqueeze(-1)
        ds = p * (torch.einsum("inx,jnx->nij", outer, wide_v[columns]) - delta) * scale
        found[0][rows] = torch.einsum("nij,jnx->inx", ds, wide_k[columns]).to(query.dtype)
        found[1][columns] = torch.einsum("nij,inx->jnx", ds, query[rows].float())
        found[2][columns] = torch.einsum("nij,inx->jnx", p, outer)
    summed = (t.view(t.shape[0], -1, groups, t.shape[2]).sum(2).to(key.dtype) for t in found[1:])
    return found[0], *summed


def agree(got, expected, tolerance):
    for mine, other in zip(comparable(got), comparable(expected)):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


def flex_agrees(tensors, n, layout, options):
    expected = npu_fusion_attention.reference(*tensors, n, layout, **options)
    agree(FLEX(*tensors, n, layout, **options), expected, 1e-5)


BANDS = [
    ({"sparse_mode": 0}, True),
    ({"sparse_mode": 2}, True),
    ({"sparse_mode": 3}, True),
    ({"sparse_mode": 4, "pre_tokens": 2, "next_tokens": 0}, True),
    ({"sparse_mode": 4, "pre_tokens": 3, "next_tokens": 1}, True),
    ({"sparse_mode": 4, "pre_tokens": 3, "next_tokens": -1}, None),
    ({"sparse_mode": 4, "pre_tokens": -1, "next_tokens": 4}, False),
]


@pytest.mark.parametrize(("d", "dv"), [(8, 8), (12, 6)])
@pytest.mark.parametrize(("sq", "sk"), [(7, 7), (5, 9), (9, 5)])
@pytest.mark.parametrize(("options", "served"), BANDS)
def test_windows_of_the_kernel_are_the_bands_asked_for(options, served, sq, sk, d, dv, monkeypatch):
    monkeypatch.setattr(cuda, "_kernel", kernel)
    monkeypatch.setattr(cuda, "_backward", backward)
    tensors = heads(sq, sk, d, dv)
    inputs = prepare(*tensors, options_of(4, "BNSD", scale=0.4, **options))
    found = cuda.flash_attention(*tensors, options_of(4, "BNSD", scale=0.4, **options))
    assert served is None or (found is not None) == served
    if found is None:
        return
    expected = npu_fusion_attention.reference(*tensors, 4, "BNSD", scale=0.4, **options)
    context, logsum = comparable(expected)
    torch.testing.assert_close(found[0], context)
    torch.testing.assert_close(found[1], logsum[..., 0])
    assert found[2] or bool(torch.isfinite(found[1]).all())
    outer = torch.randn(context.shape)
    exact = npu_fusion_attention_grad.reference(
        *tensors,
        outer,
        4,
        "BNSD",
        softmax_max=expected[1],
        softmax_sum=expected[2],
        attention_in=context,
        scale_value=0.4,
        **options,
    )
    gradients = cuda.flash_gradients(inputs, outer, *found[:2])
    for mine, other in zip(gradients, exact[:3]):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "lengths", "served"),
    [
        ({"sparse_mode": 3}, LENGTHS, True),
        ({"sparse_mode": 0}, LENGTHS, True),
        ({"sparse_mode": 4, "pre_tokens": 1, "next_tokens": 0}, LENGTHS, True),
        ({"sparse_mode": 2}, EQUAL, True),
        ({"sparse_mode": 2}, LENGTHS, False),
    ],
)
def test_packed_sequences_are_handed_over_as_starts(options, lengths, served, monkeypatch):
    monkeypatch.setattr(cuda, "_kernel", kernel)
    monkeypatch.setattr(cuda, "_backward", backward)
    sizes = lengths["actual_seq_qlen"][-1], lengths["actual_seq_kvlen"][-1]
    tensors = heads(*sizes, packed=True)
    given = options_of(4, "TND", **options, **lengths)
    found = cuda.flash_attention(*tensors, given)
    assert (found is not None) == served
    if found is None:
        return
    expected = npu_fusion_attention.reference(*tensors, 4, "TND", **options, **lengths)
    torch.testing.assert_close(found[0].squeeze(0).transpose(0, 1), expected[0])
    outer = torch.randn(found[0].shape)
    facts = {"softmax_max": expected[1], "softmax_sum": expected[2], "attention_in": expected[0]}
    exact = npu_fusion_attention_grad.reference(
        *tensors, outer.squeeze(0).transpose(0, 1), 4, "TND", **facts, **options, **lengths
    )
    got = cuda.flash_gradients(prepare(*tensors, given), outer, *found[:2])
    for mine, other in zip(got, exact[:3]):
        torch.testing.assert_close(mine.squeeze(0).transpose(0, 1), other, rtol=1e-4, atol=1e-5)


def test_what_the_kernel_has_no_word_for_is_computed_block_by_block():
    tensors = heads(5, 9, dtype=torch.bfloat16)
    options = {"sparse_mode": 4, "pre_tokens": -1, "next_tokens": 4}
    agree(FLASH(*tensors, 4, "BNSD", **options), npu_fusion_attention(*tensors, 4, "BNSD", **options), 1e-3)


@pytest.mark.parametrize("layout", ["SBH", "BSND", "TND"])
def test_torch_s_kernel_takes_the_call_and_has_a_backward(layout):
    shapes = {
        "SBH": ((6, 2, 32), (9, 2, 16)),
        "BSND": ((2, 6, 4, 8), (2, 9, 2, 8)),
        "TND": ((8, 4, 8), (13, 2, 8)),
    }
    query, key, value = (
        torch.empty(shapes[layout][side], dtype=torch.bfloat16, device="meta", requires_grad=True)
        for side in (0, 1, 1)
    )
    lengths = LENGTHS if layout == "TND" else {}
    for options in (
        {"sparse_mode": 3},
        {"sparse_mode": 4, "pre_tokens": 2, "next_tokens": 1, "keep_prob": 0.9},
    ):
        result = FLASH(query, key, value, 4, layout, **options, **lengths)
        assert (result[0].shape, result[0].dtype) == (query.shape, torch.bfloat16)
        gradients = torch.autograd.grad(result[0].sum(), (query, key, value))
        assert [g.shape for g in gradients] == [query.shape, key.shape, value.shape]
    facts = {"softmax_max": result[1], "softmax_sum": result[2], "attention_in": result[0]}
    found = npu_fusion_attention_grad.backends["flash"].function(
        query, key, value, result[0], 4, layout, sparse_mode=3, **facts, **lengths
    )
    assert [g.shape for g in found[:3]] == [query.shape, key.shape, value.shape]


def test_fake_tensors_of_the_device_take_the_kernel_and_stay_there():
    with FakeTensorMode(), torch.no_grad():
        query, key = (torch.empty(6, 2, width, dtype=torch.bfloat16, device="cuda") for width in (32, 16))
        result = npu_fusion_attention(query, key, key, 4, "SBH", sparse_mode=2)
    assert (result[0].device.type, result[0].shape) == ("cuda", (6, 2, 32))
    assert (result[1].device.type, result[1].shape) == ("cuda", (2, 4, 6, 8))


def test_the_call_is_traced_into_one_kernel():
    def step(query, key, value):
        context = FLASH(query, key, value, 4, "BNSD", sparse_mode=2)[0]
        return torch.autograd.grad(context.sum(), (query, key, value))

    tensors = [t.bfloat16().to("meta").requires_grad_() for t in heads(8, 8)]
    names = [str(node.target) for node in make_fx(step)(*tensors).graph.nodes]
    for name in ("aten._flash_attention_forward.default", "aten._flash_attention_backward.default"):
        assert names.count(name) == 1


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({"sparse_mode": 2}, "flash"),
        ({"sparse_mode": 4, "pre_tokens": 2, "next_tokens": 0}, "flash"),
        ({"sparse_mode": 6, "prefix": [3]}, "blocks"),
        ({"pse": torch.zeros(1, 4, 6, 6)}, "blocks"),
    ],
)
def test_the_kernel_is_preferred_where_it_can_serve(options, chosen):
    tensors = heads(6, 6, dtype=torch.bfloat16)
    call = npu_fusion_attention.call_of(*tensors, 4, "BNSD", **options)
    assert npu_fusion_attention.choose(Call("cuda", call.arguments)).name == chosen


@pytest.mark.parametrize(
    ("backend", "dtype", "options", "reason"),
    [
        ("flash", torch.float32, {}, "computes float16 and bfloat16"),
        ("flash", torch.bfloat16, {"sparse_mode": 6, "prefix": [2, 2]}, "no sparse mode 6"),
        ("flash", torch.bfloat16, {"sink": torch.zeros(4)}, "takes no sink"),
        ("flash", torch.bfloat16, {"atten_mask": torch.zeros(6, 6, dtype=torch.bool)}, "takes no atten_mask"),
        ("flex", torch.float64, {}, "computes float16, bfloat16 and float32"),
        ("flex", torch.float32, {"keep_prob": 0.5}, "drops no weights"),
        ("flex", torch.float32, {"pse": torch.zeros(1, 4, 6, 6, requires_grad=True)}, "no gradient"),
    ],
)
def test_backends_say_what_they_cannot_compute(backend, dtype, options, reason):
    call = npu_fusion_attention.call_of(*heads(6, 6, dtype=dtype), 4, "BNSD", **options)
    assert reason in npu_fusion_attention.backends[backend].supports(call)


@pytest.fixture
def traced_anew():
    """Flex attention traces masks and biases: each test has its own."""
    torch._dynamo.reset()


flexible_test = pytest.mark.usefixtures("traced_anew")
FLEXIBLE = {
    "everything": {},
    "causal": {"sparse_mode": 2},
    "from the right": {"sparse_mode": 3},
    "band": {"sparse_mode": 4, "pre_tokens": 2, "next_tokens": 1},
    "behind": {"sparse_mode": 4, "pre_tokens": -1, "next_tokens": 4},
    "prefix": {"sparse_mode": 6, "prefix": [5, 6]},
    "mask": {"sparse_mode": 1, "atten_mask": torch.arange(70).view(7, 10) % 3 == 0},
    "mask of heads": {"sparse_mode": 1, "atten_mask": torch.arange(560).view(2, 4, 7, 10) % 3 == 0},
    "slopes": {
        "sparse_mode": 3,
        "pse": torch.tensor(alibi_slopes(4)),
        "pse_type": 2,
        "q_start_idx": 3,
        "kv_start_idx": 0,
    },
    "roots": {"pse": torch.tensor(alibi_slopes(4)), "pse_type": 3},
    "bias": {"pse": torch.linspace(-1, 1, 280).view(1, 4, 7, 10), "pse_type": 1},
    "bias of rows": {"pse": torch.linspace(-1, 1, 40).view(1, 4, 1, 10), "pse_type": 0, "sparse_mode": 3},
    "sink": {"sink": torch.tensor([0.5, -1.0, 2.0, 0.0]), "sparse_mode": 3},
}


@flexible_test
@pytest.mark.parametrize("name", sorted(FLEXIBLE))
def test_flex_attention_computes_every_mask_and_bias(name):
    tensors = heads(7, 10, 8, 4)
    options = {"scale": 0.4, **FLEXIBLE[name]}
    agree(
        FLEX(*tensors, 4, "BNSD", **options),
        npu_fusion_attention.reference(*tensors, 4, "BNSD", **options),
        1e-5,
    )


@flexible_test
@pytest.mark.parametrize("mode", [0, 2, 3, 4, 6, 7, 8])
def test_flex_attention_keeps_packed_sequences_apart(mode):
    tensors = heads(8, 13, packed=True)
    options = {"sparse_mode": mode, **LENGTHS}
    options |= {"pre_tokens": 9, "next_tokens": 0} if mode in (4, 7, 8) else {}
    options |= {"prefix": [2, 1, 7]} if mode == 6 else {}
    agree(
        FLEX(*tensors, 4, "TND", **options),
        npu_fusion_attention.reference(*tensors, 4, "TND", **options),
        1e-5,
    )


@flexible_test
def test_flex_attention_reads_a_compressed_bias():
    size = COMPRESSED_ROWS + 6
    tensors = heads(size, size, 4, 4, n=1, g=1)
    rows = torch.arange(size - COMPRESSED_ROWS, size)[:, None]
    bias = (-0.01 * (rows - torch.arange(size)).abs()).view(1, 1, COMPRESSED_ROWS, size)
    options = {"sparse_mode": 2, "pse": bias, "pse_type": 0}
    agree(
        FLEX(*tensors, 1, "BNSD", **options),
        npu_fusion_attention.reference(*tensors, 1, "BNSD", **options),
        1e-5,
    )
