"""Every kernel against the definition in float64."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recording_npu import recording
from rectangles import RECTANGLES, compare
from torch._subclasses.fake_tensor import FakeTensorMode

from mindspeed_cp.engine import merging
from mindspeed_cp.engine.attention import CallOptions, Members, split_attention
from mindspeed_cp.engine.kernels import (
    BackwardBlock,
    choice,
    known_kernels,
    npu,
    products,
)
from mindspeed_cp.engine.kernels.cuda import CudaFlashKernel
from mindspeed_cp.engine.kernels.npu import NpuKernel
from mindspeed_cp.engine.kernels.products import ProductsKernel
from mindspeed_cp.engine.kernels.rows import band, in_rows, is_band
from mindspeed_cp.engine.masks import CAUSAL, FULL, MASKED, MaskRule
from mindspeed_cp.engine.planners import Grid
from mindspeed_cp.engine.scores import Scores
from mindspeed_cp.engine.tasks import Task, tasks
from mindspeed_cp.options import CPOptions

KERNELS = {name: kernel for name, kernel in known_kernels().items() if name in ("cpu-flash", "products")}


if torch.cuda.is_available():
    KERNELS["cuda-flash"] = CudaFlashKernel()


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
    compare(KERNELS[name], *RECTANGLES["triangle"], dtype, tolerance, slopes=slopes, root=True)


def test_large_biases_are_not_rounded_to_the_dtype_of_queries():
    slopes = torch.tensor([333.0, 77.0, 5.0, 1.3])
    compare(KERNELS["cpu-flash"], *RECTANGLES["triangle"], torch.bfloat16, 2e-2, slopes=slopes)


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
        compare(kernel, *RECTANGLES["triangle"], torch.float32, 2e-6, slopes=slopes, root=True, layout=layout)
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
        found = kernel.backward(BackwardBlock(outer, q, k, v, output.float(), logsum, task, scores))
        assert [tensor.shape for tensor in found] == [q.shape, k.shape, v.shape]


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


def test_the_kernel_that_the_page_shows_computes_in_float64():
    page = Path(choice.__file__).parents[2] / "docs" / "context-parallel.md"
    blocks = [part.split("```")[0] for part in page.read_text(encoding="utf-8").split("```python\n")[1:]]
    (snippet,) = [block for block in blocks if "KERNEL" in block]
    shown = {}
    exec(compile(snippet, str(page), "exec"), shown)
    compare(shown["KERNEL"], *RECTANGLES["given"], torch.float32, 2e-7)


def test_the_kernel_for_cpus_reads_tensors_whose_rows_are_not_contiguous():
    rule = MaskRule(6)
    results = []
    for strided in (False, True):
        torch.manual_seed(0)
        leaves = [torch.randn(1, 2, 6, 8) for _ in range(3)]
        if strided:
            leaves = [leaf.transpose(-1, -2).contiguous().transpose(-1, -2) for leaf in leaves]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        output = split_attention(*leaves, (rule,), Members(0), CPOptions(Grid(1)), CallOptions(0.35))
        output.square().sum().backward()
        results.append([output.detach(), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(*results)
