"""Every kernel against the definition in float64, the choice among them, and the joining of their results."""

import importlib.util
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from recording_npu import recording
from test_engine_worlds import LENGTH, RULES, check, chosen, grids, members_of
from torch._subclasses.fake_tensor import FakeTensorMode

from mindspeed_core.activation import prepare
from mindspeed_core.feature import DeclarationError
from mindspeed_core.testing import run_world
from mindspeed_core.testing.model_flags import training_flags
from mindspeed_cp.engine import merging
from mindspeed_cp.engine.attention import CallOptions, Members, split_attention
from mindspeed_cp.engine.block import attend, attend_backward
from mindspeed_cp.engine.kernels import (
    BlockKernel,
    Case,
    add_kernel,
    choice,
    known_kernels,
    npu,
    products,
    using,
)
from mindspeed_cp.engine.kernels.cuda import CudaFlashKernel
from mindspeed_cp.engine.kernels.npu import NpuKernel
from mindspeed_cp.engine.kernels.products import ProductsKernel
from mindspeed_cp.engine.kernels.rows import band, in_rows, is_band
from mindspeed_cp.engine.layout import zigzag
from mindspeed_cp.engine.local import zeros_for
from mindspeed_cp.engine.masks import CAUSAL, FULL, MASKED, MaskRule
from mindspeed_cp.engine.merging import FusedMerger, Merger
from mindspeed_cp.engine.planners import RING, Grid, layout_of
from mindspeed_cp.engine.scores import Dropout, Scores
from mindspeed_cp.engine.tasks import Task, tasks
from mindspeed_cp.modules import core_attention
from mindspeed_cp.modules.batch import SplitBatch
from mindspeed_cp.options import CPOptions, cp_options

WHOLE = 40
MATRIX = np.random.default_rng(3).random((WHOLE, WHOLE)) < 0.3
MATRIX[12:15] = False
# Rules, with queries and keys of a rectangle.
RECTANGLES = {
    "triangle": (MaskRule(WHOLE), (10, 30), (10, 30)),
    "rectangle": (MaskRule(WHOLE), (20, 40), (0, 13)),
    "rectangle and triangle": (MaskRule(WHOLE), (8, 40), (0, 40)),
    "band": (MaskRule(WHOLE, window=6), (10, 40), (5, 40)),
    "band ahead": (MaskRule(WHOLE, causal=False, window=5), (10, 40), (5, 37)),
    "small documents": (MaskRule(WHOLE, ends=(7, 31, WHOLE), window=4), (0, 40), (0, 40)),
    "given": (MaskRule(WHOLE, causal=False, matrix=MATRIX), (5, 40), (0, 38)),
    "given and causal": (MaskRule(WHOLE, matrix=MATRIX), (5, 40), (0, 38)),
}
KERNELS = {name: kernel for name, kernel in known_kernels().items() if name in ("cpu-flash", "products")}
if torch.cuda.is_available():
    KERNELS["cuda-flash"] = CudaFlashKernel()


def definition(q, k, v, rule, queries, keys, options):
    """Scores ``[b, n, q, k]`` of a rectangle, in float64, and values of all query heads."""
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    i, j = np.arange(*queries), np.arange(*keys)
    scores = q @ k.transpose(-1, -2) * options.scale
    if options.slopes is not None:
        distance = torch.from_numpy(np.abs(i[:, None] - j[None]))
        scores = scores - options.slopes.double().view(-1, 1, 1) * distance
    return scores.masked_fill(~torch.from_numpy(rule.visible(i, j)), float("-inf")), v


def compare(kernel, rule, queries, keys, dtype, tolerance, *, heads=4, key_heads=2, value_width=8, **given_):
    """A rectangle by a kernel against the definition: results, and gradients for given numbers."""
    torch.manual_seed(0)
    device = kernel.devices[0] if kernel.devices[0] == "cuda" else "cpu"
    wide = {"dtype": torch.float64}
    q, outer = (torch.randn(2, heads, queries[1] - queries[0], w, **wide) for w in (8, value_width))
    k, v = (torch.randn(2, key_heads, keys[1] - keys[0], w, **wide) for w in (8, value_width))
    scores = Scores(0.35, rule, heads=torch.arange(heads), **given_)
    wanted, values = definition(q, k, v, rule, queries, keys, scores)
    # As if the rows saw further keys elsewhere.
    elsewhere, output = torch.randn(wanted.shape[:3], **wide), torch.randn(outer.shape, **wide)
    logsum = torch.logaddexp(torch.logsumexp(wanted, -1), elsewhere)
    weights = (wanted - logsum.unsqueeze(-1)).exp()
    inner = weights * (outer @ values.transpose(-1, -2) - (outer * output).sum(-1, keepdim=True)) * 0.35
    share = heads // key_heads
    expected = (
        (torch.softmax(wanted, -1).nan_to_num(0.0) @ values),
        torch.logsumexp(wanted, -1),
        inner @ k.repeat_interleave(share, 1),
        (inner.transpose(-1, -2) @ q).unflatten(1, (key_heads, share)).sum(2),
        (weights.transpose(-1, -2) @ outer).unflatten(1, (key_heads, share)).sum(2),
    )
    mine = [tensor.to(device, dtype) for tensor in (q, k, v)]
    work = tasks(rule, ((0, queries),), ((0, keys),), positions=scores.positional)
    with using(kernel):
        merger = Merger(mine[0], value_width)
        attend(merger, slice(0, 2), *mine, work, scores)
        grads = zeros_for(*mine)
        facts = output.to(device, dtype), logsum.float().to(device), outer.to(device, dtype)
        attend_backward(grads, slice(0, 2), *mine, *facts, work, scores)
    empty = expected[1].isinf()
    assert torch.equal(merger.logsum.isinf().cpu(), empty)
    for got, want in zip((merger.output, merger.logsum.masked_fill(empty.to(device), 0.0), *grads),
                         (expected[0], expected[1].masked_fill(empty, 0.0), *expected[2:])):  # fmt: skip
        assert (got.double().cpu() - want).norm() / want.norm() < tolerance
    return work


@pytest.mark.parametrize("rectangle", RECTANGLES)
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_computes_every_kind_of_task(name, rectangle):
    tight = (torch.float32, 2e-6) if name != "cuda-flash" else (torch.bfloat16, 2e-2)
    compare(KERNELS[name], *RECTANGLES[rectangle], *tight)
    compare(KERNELS[name], *RECTANGLES[rectangle], torch.bfloat16, 2e-2, heads=3, key_heads=3)


@pytest.mark.parametrize("name", KERNELS)
def test_values_may_be_narrower_and_scores_have_a_bias(name):
    dtype, tolerance = (torch.float32, 2e-6) if name != "cuda-flash" else (torch.bfloat16, 2e-2)
    compare(KERNELS[name], *RECTANGLES["rectangle and triangle"], dtype, tolerance, value_width=5)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    compare(KERNELS[name], *RECTANGLES["rectangle and triangle"], dtype, tolerance, slopes=slopes)
    compare(KERNELS[name], *RECTANGLES["given"], dtype, tolerance, slopes=slopes)


@pytest.mark.parametrize("rectangle", RECTANGLES)
def test_products_in_blocks_of_rows_are_the_same(rectangle, monkeypatch):
    monkeypatch.setattr(products, "MOST_SCORES", 1)
    compare(ProductsKernel(), *RECTANGLES[rectangle], torch.float64, 1e-6)


@pytest.mark.parametrize("layout", ["SBH", "BNSD"])
def test_the_kernel_for_npus_says_what_it_means(layout):
    seen = {
        "triangle": {3},
        "rectangle": {0},
        "rectangle and triangle": {0, 3},
        "band": {4},
        "band ahead": {4},
        "small documents": {1},
        "given": {1},
        "given and causal": {1},
    }
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    kernel = NpuKernel(devices=("cpu",))
    with recording() as calls:
        for name, modes in seen.items():
            calls.clear()
            compare(kernel, *RECTANGLES[name], torch.float32, 2e-6, value_width=6, layout=layout)
            made = {(operator, mode) for operator, where, mode in calls if where == layout}
            kinds = ("npu_fusion_attention", "npu_fusion_attention_grad")
            assert made == {(kind, mode) for kind in kinds for mode in modes}, name
        calls.clear()
        compare(kernel, *RECTANGLES["triangle"], torch.float32, 2e-6, slopes=slopes, layout=layout)
        operators = "npu_fusion_attention_v2", "npu_fusion_attention_grad_v2"
        assert dict(calls) == {(operator, layout, 3): 1 for operator in operators}
        calls.clear()
        compare(kernel, *RECTANGLES["rectangle"], torch.float32, 2e-6, slopes=slopes, layout=layout)
        assert not calls


@st.composite
def windows(draw):
    length = draw(st.integers(8, 48))
    inner = draw(st.lists(st.integers(1, length - 1), unique=True, max_size=4))
    ends = (*sorted(inner), length) if inner else ()
    causal = draw(st.booleans())
    prefix = draw(st.integers(0, length)) if causal and not ends else 0
    rule = MaskRule(length, causal=causal, ends=ends, window=draw(st.integers(0, length)), prefix=prefix)
    edges = st.lists(st.integers(0, length), min_size=2, max_size=2).map(sorted)
    return rule, draw(edges), draw(edges)


@settings(max_examples=150, deadline=None)
@given(windows())
def test_what_is_called_a_band_is_one(drawn):
    rule, queries, keys = drawn
    for task in tasks(rule, ((0, tuple(queries)),), ((0, tuple(keys)),)):
        if is_band(task, rule):
            before, behind = band(task, rule)
            i, j = np.arange(*task.rows), np.arange(*task.columns)
            seen = rule.visible(i + task.origin[0] - i[0], j + task.origin[1] - j[0])
            step = (j - j[0])[None] - (i - i[0] + len(j) - len(i))[:, None]
            # Kernels take a negative limit for none at all.
            assert min(before, behind) >= 0
            assert (seen == ((step >= -before) & (step <= behind))).all()
            assert seen.any(1).all()


@pytest.mark.parametrize("kind", [FULL, CAUSAL, MASKED])
@pytest.mark.parametrize("most", [1, 3, 8, 100])
def test_blocks_of_rows_have_every_score_once(kind, most):
    whole = Task((4, 12), (2, 10), kind, (30, 20))
    count = np.zeros((16, 16), dtype=int)
    for part in in_rows(whole, most):
        (a, b), (c, d) = part.rows, part.columns
        assert b - a <= most
        assert (part.origin[0] - a, part.origin[1] - c) == (26, 18)
        assert (b - a == d - c) or part.kind != CAUSAL
        count[a:b, c:d] += np.tril(np.ones((b - a, d - c), int)) if part.kind == CAUSAL else 1
    wanted = np.zeros_like(count)
    wanted[4:12, 2:10] = np.tril(np.ones((8, 8), int)) if kind == CAUSAL else 1
    assert (count == wanted).all()


def case(**given_):
    facts = {"kind": CAUSAL, "band": False, "square": True, "device": "npu", "dtype": torch.bfloat16}
    facts |= {"heads": 8, "key_heads": 2, "width": 64, "value_width": 64, "bias": False, "dropout": False}
    return Case(**{**facts, **given_})


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({}, "npu-fusion"),
        ({"bias": True}, "npu-fusion"),
        ({"kind": FULL, "square": False}, "npu-fusion"),
        ({"kind": FULL, "square": False, "bias": True}, "products"),
        ({"kind": MASKED}, "npu-fusion"),
        ({"dropout": True}, "products"),
        ({"dtype": torch.float64}, "products"),
        ({"value_width": 128}, "products"),
        ({"device": "cuda"}, "cuda-flash"),
        ({"device": "cuda", "kind": MASKED, "band": True}, "cuda-flash"),
        ({"device": "cuda", "kind": MASKED}, "products"),
        ({"device": "cuda", "dtype": torch.float32}, "products"),
        ({"device": "cuda", "width": 512}, "products"),
        ({"device": "cpu", "dtype": torch.float64}, "cpu-flash"),
        ({"device": "cpu", "dtype": torch.float16}, "products"),
        ({"device": "cpu", "dropout": True}, "products"),
        ({"device": "xpu"}, "products"),
    ],
)
def test_the_preferred_kernel_that_can_is_chosen(facts, name, monkeypatch):
    monkeypatch.setattr(CudaFlashKernel, "missing", lambda self: "")
    assert choice.choose(case(**facts)).name == name


def test_without_the_operators_npus_use_products_and_say_so(monkeypatch, caplog):
    monkeypatch.setattr("mindspeed_cp.engine.kernels.npu.find_spec", lambda name: None)
    monkeypatch.setattr(choice, "_logged", set())
    assert choice.choose(case()).name == "products"
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "attention over split sequences on npu uses products; npu-fusion cannot: package mindspeed-kernels "
        "is not installed"
    ]


class Acme(ProductsKernel):
    """A kernel of somebody else's, preferred on CPUs."""

    name = "acme"
    devices = ("cpu",)
    priority = 50

    def __init__(self):
        self.calls = 0

    def forward(self, q, k, v, task, scores):
        self.calls += 1
        return super().forward(q, k, v, task, scores)


def test_another_package_adds_a_kernel(monkeypatch):
    acme = Acme()
    both = {"acme": acme, "again": acme}
    installed = SimpleNamespace(sound=lambda: both, distribution=lambda name: "acme-kernels", broken=[])
    monkeypatch.setattr(choice, "installed_extensions", lambda point: installed)
    monkeypatch.setattr(choice, "_kernels", dict(choice._kernels))
    monkeypatch.setattr(choice, "_chosen", {})
    monkeypatch.setattr(choice, "_loaded", False)
    tensors = [torch.randn(1, 2, 6, 4) for _ in range(3)]
    split_attention(*tensors, (MaskRule(6),), Members(0), CPOptions(Grid(1)), CallOptions(1.0))
    assert acme.calls == 1
    assert known_kernels()["acme"] is acme
    with pytest.raises(DeclarationError, match="'acme' already"):
        add_kernel(Acme())


def test_what_is_no_kernel_is_refused_with_the_reason():
    with pytest.raises(DeclarationError, match="not an instance"):
        choice.check_kernel(Acme)
    nameless = type("Nameless", (Acme,), {"name": None})()
    with pytest.raises(DeclarationError, match="has no name"):
        choice.check_kernel(nameless)
    assert not isinstance(Acme, BlockKernel)


@pytest.mark.parametrize("module", [npu, merging])
def test_the_operators_for_npus_need_not_be_installed(module, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("mindspeed_kernels")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mindspeed_kernels", None)
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_again", module.__file__)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize(
    ("task", "rule"),
    [
        (Task((0, 48), (0, 48), CAUSAL), MaskRule(64)),
        (Task((0, 48), (0, 64), FULL), MaskRule(64)),
        (Task((0, 48), (0, 64), MASKED, (16, 0)), MaskRule(64, window=60)),
    ],
)
def test_the_kernel_for_cuda_has_its_shapes(task, rule):
    kernel, scores, keys = CudaFlashKernel(), Scores(0.2, rule), task.columns[1]
    like = {"dtype": torch.bfloat16, "device": "cuda"}
    with FakeTensorMode():
        q, outer = torch.empty(2, 4, 48, 20, **like), torch.empty(2, 4, 48, 12, **like)
        k, v = torch.empty(2, 2, keys, 20, **like), torch.empty(2, 2, keys, 12, **like)
        output, logsum = kernel.forward(q, k, v, task, scores)
        assert (output.shape, output.dtype) == (outer.shape, q.dtype)
        assert (logsum.shape, logsum.dtype) == (q.shape[:3], torch.float32)
        found = kernel.backward(outer, q, k, v, output.float(), logsum, task, scores)
        assert [tensor.shape for tensor in found] == [q.shape, k.shape, v.shape]


def test_flags_reach_the_kernels(monkeypatch):
    wanted = ("--use-fused-ring-attention-update", "--megatron-cp-in-bnsd", "--softmax-type", "off-by-one")
    flags = training_flags(("--context-parallel-size", "2", *wanted), 1)
    args = prepare(flags, platform="cpu", host="standalone").args
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, softmax_type="off-by-one")
    alone = SimpleNamespace(tp=SimpleNamespace(rank=lambda: 0, size=lambda: 1))
    given_ = {"options": cp_options(args), "members": lambda: Members(0), "pg_collection": alone}
    module = core_attention.SplitCoreAttention(config, 1, AttnMaskType.causal, "self", **given_)
    seen = []
    monkeypatch.setattr(core_attention, "split_attention", lambda q, *rest: seen.append(rest[4:6]) or q)
    batch = SplitBatch(rules=(MaskRule(6),))
    module(*(torch.zeros(6, 1, 2, 4) for _ in range(3)), None, packed_seq_params=batch)
    ((options, call),) = seen
    assert (options.fused_update, options.kernel_layout, call.sink.tolist()) == (True, "BNSD", [0.0, 0.0])


def merged(kind, dtype):
    torch.manual_seed(0)
    query = torch.zeros(2, 3, 10, 4, dtype=dtype)
    merger = kind(query, 5)
    for samples, rows in ((slice(0, 2), (0, 10)), (slice(0, 2), (4, 10)), (slice(1, 2), (0, 7))):
        count = len(range(*samples.indices(2)))
        output = torch.randn(count, 3, rows[1] - rows[0], 5).to(dtype)
        logsum = 3 * torch.randn(count, 3, rows[1] - rows[0])
        logsum[:, :, 1] = float("-inf")
        merger.add(samples, rows, output.masked_fill(logsum.isinf().unsqueeze(-1), 0), logsum)
    return merger.output, merger.logsum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_update_joins_as_the_definition(dtype):
    for got, want in zip(merged(FusedMerger, dtype), merged(Merger, dtype)):
        torch.testing.assert_close(got, want)
        assert got.dtype == torch.float32


def test_the_fused_update_refuses_what_it_would_round():
    with pytest.raises(ValueError, match="queries are float64"):
        FusedMerger(torch.zeros(1, 1, 2, 2, dtype=torch.float64), 2)


def key_gradient_error(ranks):
    """Relative error of bfloat16 gradients of keys round a ring of simulated ranks."""
    torch.manual_seed(0)
    length, rule = 1024, MaskRule(1024)
    q, k, v, outer = (torch.randn(1, 2, length, 32).bfloat16() for _ in range(4))
    whole = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    scores, values = definition(*whole, rule, (0, length), (0, length), Scores(0.2, rule))
    (torch.softmax(scores, -1) @ values).backward(outer.double())
    layout = zigzag(length, ranks)
    places = [torch.from_numpy(layout.positions(rank)) for rank in range(ranks)]
    total, facts = torch.zeros(k.shape), Scores(0.2, rule)
    for rank, mine in enumerate(places):
        query = q[:, :, mine]
        work = [tasks(rule, layout.chunks(rank), layout.chunks(block)) for block in range(ranks)]
        merger = Merger(query, 32)
        for block, held in enumerate(places):
            attend(merger, slice(0, 1), query, k[:, :, held], v[:, :, held], work[block], facts)
        output = merger.output.bfloat16()
        for block, held in enumerate(places):
            kv = k[:, :, held], v[:, :, held]
            found = zeros_for(query, *kv)
            given_ = output, merger.logsum, outer[:, :, mine]
            attend_backward(found, slice(0, 1), query, *kv, *given_, work[block], facts)
            total[:, :, held] += found[1]
    wanted = whole[1].grad
    return float((total.double() - wanted).norm() / wanted.norm())


def test_longer_rings_do_not_lose_precision():
    assert key_gradient_error(32) <= 1.1 * key_gradient_error(2)


def kept_for_backward():
    saved = []
    tensors = [torch.randn(2, n, 16, 8, requires_grad=True) for n in (4, 2, 2)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        output = split_attention(*tensors, (MaskRule(16),), Members(0), CPOptions(Grid(1)), CallOptions(1.0))
        output.sum().backward()
    pieces = [tensor for tensor in saved if tensor.dim() == 3]
    assert len(saved) == 5
    return sum(tensor.untyped_storage().nbytes() for tensor in pieces) / (2 * 4 * 16)


def test_backward_keeps_one_number_for_each_row_and_head():
    assert kept_for_backward() == 4
    with recording():
        assert kept_for_backward() == 4


def errors(grid, members, rule, dtype):
    """Relative errors of output and gradients against float64."""
    torch.manual_seed(0)
    length = rule.length
    given_ = [torch.randn(1, n, length, 16).to(dtype) for n in (4, 2, 2, 4)]
    whole = [tensor.double().requires_grad_() for tensor in given_[:3]]
    scores, values = definition(*whole, rule, (0, length), (0, length), Scores(0.25, rule))
    expected = torch.softmax(scores, -1) @ values
    expected.backward(given_[3].double())
    position = torch.from_numpy(layout_of(grid, (rule,)).positions(members.rank))
    mine = [tensor[:, :, position].requires_grad_() for tensor in given_[:3]]
    output = split_attention(*mine, (rule,), members, CPOptions(grid), CallOptions(0.25))
    output.backward(given_[3][:, :, position])
    squares = []
    for got, want in zip((output, *(t.grad for t in mine)), (expected, *(t.grad for t in whole))):
        want = want[:, :, position]
        squares.append(torch.stack([(got.double() - want).square().sum(), want.square().sum()]))
    total = torch.stack(squares).detach()
    if grid.ranks > 1:
        dist.all_reduce(total)
    return [float(value) for value in (total[:, 0] / total[:, 1]).sqrt()]


def check_sink(grid, members, dtype, tolerance, **given_):
    """A further score of every row, against the softmax over one column more; its gradient too."""
    torch.manual_seed(0)
    rule, length = MaskRule(LENGTH, window=9), LENGTH
    q, k, v, outer = (torch.randn(2, n, length, 8, dtype=torch.float64) for n in (4, 2, 2, 4))
    sink = torch.randn(4, dtype=torch.float64)
    whole = [tensor.clone().requires_grad_() for tensor in (q, k, v, sink)]
    scores, values = definition(*whole[:3], rule, (0, length), (0, length), Scores(0.35, rule))
    column = whole[3].view(1, -1, 1, 1).expand(2, 4, length, 1)
    expected = torch.softmax(torch.cat((scores, column), -1), -1)[..., :length] @ values
    expected.backward(outer)
    position = torch.from_numpy(layout_of(grid, (rule,)).positions(members.rank))
    mine = [tensor[:, :, position].to(dtype).requires_grad_() for tensor in (q, k, v)]
    own = sink.to(dtype).requires_grad_()
    output = split_attention(*mine, (rule,), members, *chosen(grid, 0.35, sink=own, **given_))
    output.backward(outer[:, :, position].to(dtype))
    if grid.ranks > 1:
        dist.all_reduce(own.grad)
    pairs = [(output, expected), *((t.grad, w.grad) for t, w in zip(mine, whole))]
    pairs = [(got, want[:, :, position]) for got, want in pairs]
    for got, want in (*pairs, (own.grad, whole[3].grad)):
        assert (got.double() - want).norm() / want.norm() < tolerance, grid


def test_a_further_score_without_value_takes_part():
    check_sink(Grid(1), Members(0), torch.float64, 1e-9)
    with recording():
        check_sink(Grid(1), Members(0), torch.float32, 2e-6)


def every_algorithm_on_four_ranks():
    """What the operators for NPUs were asked for, and the errors of bfloat16, of every algorithm."""
    dist.init_process_group("gloo")
    calls, precision = {}, {"one process": errors(Grid(1), Members(0), MaskRule(512), torch.bfloat16)}
    matrix = np.random.default_rng(0).random((LENGTH, LENGTH)) < 0.4
    given_rule = MaskRule(LENGTH, causal=False, matrix=matrix)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    single = {"dtype": torch.float32, "tolerance": 1e-6}
    for name, grid in grids(4):
        members = members_of(grid)
        precision[name] = errors(grid, members, MaskRule(512), torch.bfloat16)
        check_sink(grid, members, torch.float64, 1e-9)
        with recording() as log:
            log.clear()
            for rule in RULES.values():
                check(grid, members, rule(LENGTH), 4, 2, LENGTH, **single)
            check(grid, members, (given_rule,), 4, 4, LENGTH, kernel_layout="BNSD", **single)
            check(grid, members, RULES["causal"](LENGTH + 5), 5, 5, LENGTH + 5, narrow=True, **single)
            check(grid, members, RULES["causal"](LENGTH), 4, 2, LENGTH, slopes=slopes, **single)
            check(grid, members, RULES["documents"](LENGTH), 4, 2, LENGTH, dropout=Dropout(0.2, 77), **single)
            if grid.method == RING and grid.outer > 1:
                for rule in ("causal", "window", "documents"):
                    check(grid, members, RULES[rule](LENGTH), 4, 2, LENGTH, fused_update=True, **single)
            calls[name] = dict(log)
        if grid.method == RING and grid.outer > 1:
            check(grid, members, RULES["documents"](LENGTH), 4, 2, LENGTH, fused_update=True, **single)
            check_sink(grid, members, torch.float32, 2e-6, fused_update=True)
    dist.barrier()
    dist.destroy_process_group()
    return calls, precision


@pytest.fixture(scope="module")
def four_ranks():
    return run_world(every_algorithm_on_four_ranks, 4)


def test_every_algorithm_asks_npus_for_what_they_compute(four_ranks):
    asked = {name: {key for calls, _ in four_ranks for key in calls[name]} for name in four_ranks[0][0]}
    for name, made in asked.items():
        for kind in ("npu_fusion_attention", "npu_fusion_attention_grad"):
            assert {(kind, "SBH", mode) for mode in (0, 1, 3, 4)} | {(kind, "BNSD", 1)} <= made, name
        ring = name in ("ring", "ring-contiguous", "double-ring", "hybrid")
        assert (("npu_ring_attention_update", "SBH", 0) in made) == ring, name
        assert {("npu_fusion_attention_v2", "SBH", 3), ("npu_fusion_attention_grad_v2", "SBH", 3)} <= made, (
            name
        )


def test_no_algorithm_is_less_exact_in_bfloat16_than_one_kernel(four_ranks):
    for _, precision in four_ranks[:1]:
        alone = precision.pop("one process")
        for name, found in precision.items():
            for part, error, single in zip(("output", "dq", "dk", "dv"), found, alone):
                assert error <= 1.5 * single, (name, part, error, single)
