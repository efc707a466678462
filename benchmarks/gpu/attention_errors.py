"""Fused attention and the block kernels of context parallelism against the definition in float64.

Errors are ``|got - exact| / |exact|`` (Frobenius norms) of the output and of each gradient, for random
inputs. Which of torch's kernels computed them is read from a profile, since a backend may hand a call on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from report import Report
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from mindspeed_cp.engine.attention import CallOptions, Members, split_attention
from mindspeed_cp.engine.block import attend, attend_backward
from mindspeed_cp.engine.kernels import known_kernels, using
from mindspeed_cp.engine.kernels.choice import kernel_for
from mindspeed_cp.engine.layout import zigzag
from mindspeed_cp.engine.local import work_with, zeros_for
from mindspeed_cp.engine.masks import MaskRule
from mindspeed_cp.engine.merging import Merger
from mindspeed_cp.engine.planners import Grid
from mindspeed_cp.engine.scores import Scores
from mindspeed_cp.engine.tasks import tasks
from mindspeed_cp.options import CPOptions
from mindspeed_kernels.attention.bias import alibi_slopes
from mindspeed_kernels.ops import npu_fusion_attention

TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float16: 3e-3, torch.float32: 1e-3}
"""Largest relative error; that of float32 leaves room for TF32 in compiled kernels."""

_PARTS = ("output", "dq", "dk", "dv")
_KERNELS = {
    "flash": "_flash_attention_forward",
    "efficient": "_efficient_attention_forward",
    "flash on CPU": "_scaled_dot_product_flash_attention_for_cpu",
    "flex": "flex_attention",
}
"""Kernel: part of the name under which a profile shows it; anything else is matrix products."""


@dataclass(frozen=True)
class Case:
    """One attention.

    Attributes:
        name: what is particular about it.
        options: of ``npu_fusion_attention``, from the length of queries.
        heads: of queries.
        key_heads: of keys and values.
        width: of queries and keys.
        value_width: of values; 0 for the same.
        keys: length of keys as a share of that of queries.
        packed: layout TND, of one row of documents.
        dtype: of the inputs.
    """

    name: str
    options: Callable[[int], Mapping[str, Any]] = field(default=lambda s: {})
    heads: int = 8
    key_heads: int = 2
    width: int = 128
    value_width: int = 0
    keys: float = 1.0
    packed: bool = False
    dtype: torch.dtype = torch.bfloat16


def _ends(length: int) -> list[int]:
    return [length // 8, length // 2, length // 2 + 1, length]


def _documents(length: int) -> dict[str, list[int]]:
    return {"actual_seq_qlen": _ends(length), "actual_seq_kvlen": _ends(length)}


CASES = (
    Case("causal, grouped heads", lambda s: {"sparse_mode": 2}),
    Case("causal, as many key heads", lambda s: {"sparse_mode": 2}, key_heads=8),
    Case("causal, one key head", lambda s: {"sparse_mode": 2}, key_heads=1),
    Case("causal float16", lambda s: {"sparse_mode": 2}, dtype=torch.float16),
    Case("causal float32", lambda s: {"sparse_mode": 2}, dtype=torch.float32),
    Case("every key", lambda s: {}),
    Case("causal from the last key", lambda s: {"sparse_mode": 3}, keys=1.5),
    Case("window", lambda s: {"sparse_mode": 4, "pre_tokens": s // 8, "next_tokens": 0}),
    Case("window both ways", lambda s: {"sparse_mode": 4, "pre_tokens": s // 8, "next_tokens": s // 16}),
    Case("packed documents", lambda s: {"sparse_mode": 2, **_documents(s)}, packed=True),
    Case("packed documents, every key", lambda s: _documents(s), packed=True),
    Case(
        "packed documents, window",
        lambda s: {"sparse_mode": 4, "pre_tokens": s // 16, "next_tokens": 0, **_documents(s)},
        packed=True,
    ),
    Case("width 100, values of 64", lambda s: {"sparse_mode": 2}, width=100, value_width=64),
    Case("width 256", lambda s: {"sparse_mode": 2}, width=256),
    Case("prefix", lambda s: {"sparse_mode": 6, "prefix": [s // 4, s // 2]}),
    Case("ALiBi", lambda s: {"sparse_mode": 2, "pse": torch.tensor(alibi_slopes(8)), "pse_type": 2}),
)


def measure(report: Report) -> None:
    """Measure context parallelism's kernels, then fused attention; what has to be compiled comes last."""
    length = 128 if report.smoke else 2048
    rules = {
        "causal": MaskRule(length),
        "every key": MaskRule(length, causal=False),
        "window": MaskRule(length, window=length // 8),
        "documents": MaskRule(length, ends=tuple(_ends(length))),
        "documents, window": MaskRule(length, ends=tuple(_ends(length)), window=length // 16),
    }
    block_kernels(report, rules)
    for ranks in (2, 8):
        simulated_ring(report, rules["causal"], ranks)
    late = [case.name for case in CASES if not fused_attention(report, case, length, compiled=False)]
    for case in CASES:
        if not fused_attention(report, case, length, compiled=True):
            late.append(f"{case.name}: flex")
    report.facts["left_out"] = {"no time": late}
    worst = max((row["worst"] for row in report.rows if "worst" in row), default=0.0)
    failed = sum(row["passed"] is False for row in report.rows)
    report.headline = f"{failed} of {len(report.rows)} failed; largest error {worst:.2g}"


def fused_attention(report: Report, case: Case, length: int, *, compiled: bool) -> bool:
    """Compare the backends that serve a case; the one that is chosen by itself is marked.

    Args:
        report: takes the rows.
        case: what to compute.
        length: of queries.
        compiled: flex attention, which is compiled for each case, instead of all the others.

    Returns:
        Whether there was time.
    """
    if report.remaining() < 20:
        return False
    width = min(case.width, 32) if report.smoke else case.width
    value_width = min(case.value_width or width, width)
    sizes = length, round(length * case.keys)
    shapes = [(case.heads, sizes[0], width), (case.key_heads, sizes[1], width)]
    shapes += [(case.key_heads, sizes[1], value_width), (case.heads, sizes[0], value_width)]
    layout = "TND" if case.packed else "BNSD"
    torch.manual_seed(0)
    drawn = [torch.randn(s, n, w) if case.packed else torch.randn(2, n, s, w) for n, s, w in shapes]
    tensors = [tensor.to(report.device, case.dtype) for tensor in drawn]
    options = {"scale": width**-0.5, **case.options(length)}
    options = {k: v.to(report.device) if isinstance(v, Tensor) else v for k, v in options.items()}

    def attend_by(function: Callable[..., Any]) -> Callable[..., Tensor]:
        def attended(*inputs: Tensor) -> Tensor:
            context: Tensor = function(*inputs, case.heads, layout, **options)[0]
            return context

        return attended

    exact = both_ways(attend_by(npu_fusion_attention.reference), [tensor.double() for tensor in tensors])
    call = npu_fusion_attention.call_of(*tensors[:3], case.heads, layout, **options)
    chosen = npu_fusion_attention.choose(call)
    for backend in npu_fusion_attention.candidates(report.device):
        if (backend.name == "flex") is not compiled:
            continue
        mark = " (chosen)" if backend is chosen else ""
        name = f"fused attention, {case.name}: {backend.name}{mark}"
        refused = backend.refusal(call)
        if refused:
            report.row(name, refused=refused)
            continue
        if compiled:
            # Otherwise the number of compiled variants of one function reaches its limit.
            torch._dynamo.reset()
        with report.check(name) as found:
            compared(found, attend_by(backend.function), tensors, exact)
    return True


def block_kernels(report: Report, rules: Mapping[str, MaskRule]) -> None:
    """Compare the kernels that compute blocks of split sequences, each on a whole sequence."""
    for name, rule in rules.items():
        tensors = heads(report, rule.length)
        scale = tensors[0].shape[-1] ** -0.5
        exact = both_ways(lambda *t: defined(*t, rule, scale), [t.double() for t in tensors])  # noqa: B023
        for kernel in known_kernels().values():
            if not ({report.device, "*"} & {*kernel.devices}) or kernel.missing():
                continue
            used: set[str] = set()

            def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                used.update(kernels_for(q, k, v, rule, scale))  # noqa: B023 - called at once
                options, call = CPOptions(Grid(1)), CallOptions(scale)  # noqa: B023
                return split_attention(q, k, v, (rule,), Members(0), options, call)  # noqa: B023

            with report.check(f"block kernels, {name}: {kernel.name}") as found, using(kernel):
                compared(found, attended, tensors, exact)
                found["computed_by"] = ", ".join(sorted(used))


def kernels_for(q: Tensor, k: Tensor, v: Tensor, rule: MaskRule, scale: float) -> set[str]:
    """Return the names of the kernels that compute the tasks of a whole sequence."""
    whole = ((0, (0, rule.length)),)
    scores = Scores(scale, rule)
    return {kernel_for(q, k, v, task, scores).name for task in tasks(rule, whole, whole)}


def simulated_ring(report: Report, rule: MaskRule, ranks: int) -> None:
    """Compare blocks of keys joined one after another, as ring attention on several ranks joins them."""
    tensors = heads(report, rule.length)
    scale = tensors[0].shape[-1] ** -0.5
    exact = both_ways(lambda *t: defined(*t, rule, scale), [t.double() for t in tensors])
    with report.check(f"ring of {ranks} simulated ranks") as found:
        q, k, v, outer = tensors
        layout, facts = zigzag(rule.length, ranks), Scores(scale, rule)
        places = [torch.from_numpy(layout.positions(rank)).to(report.device) for rank in range(ranks)]
        got = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in (outer, q, k, v)]
        for rank, mine in enumerate(places):
            work = [
                work_with([(slice(None), facts)], layout.chunks(rank), layout.chunks(block))
                for block in range(ranks)
            ]
            query, gradient = q[:, :, mine], outer[:, :, mine]
            merger = Merger(query, v.shape[-1])
            for block, held in enumerate(places):
                attend(merger, query, k[:, :, held], v[:, :, held], work[block])
            output = merger.output.to(q.dtype)
            got[0][:, :, mine] = output.float()
            for block, held in enumerate(places):
                held_kv = k[:, :, held], v[:, :, held]
                parts = zeros_for(query, *held_kv)
                attend_backward(parts, query, *held_kv, output, merger.logsum, gradient, work[block])
                got[1][:, :, mine] += parts[0]
                got[2][:, :, held] += parts[1]
                got[3][:, :, held] += parts[2]
        check_errors(found, got, exact, q.dtype)


def heads(report: Report, length: int) -> list[Tensor]:
    """Return random bfloat16 queries, keys, values (grouped) and gradient of the output, ``[b, n, s, d]``."""
    torch.manual_seed(0)
    width = 16 if report.smoke else 128
    return [torch.randn(2, n, length, width).to(report.device, torch.bfloat16) for n in (8, 2, 2, 8)]


def defined(query: Tensor, key: Tensor, value: Tensor, rule: MaskRule, scale: float) -> Tensor:
    """Return attention under a mask rule by its definition, in the dtype of the inputs."""
    share = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    positions = torch.arange(rule.length).numpy()
    seen = torch.from_numpy(rule.visible(positions, positions)).to(query.device)
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~seen, float("-inf"))
    return torch.softmax(scores, -1) @ value


def both_ways(function: Callable[..., Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the output of a function of three tensors and their gradients for the fourth."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors[:3]]
    output = function(*leaves)
    output.backward(tensors[3])
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def compared(
    found: dict[str, Any], function: Callable[..., Tensor], tensors: Sequence[Tensor], exact: Sequence[Tensor]
) -> None:
    """Run a function both ways under a profile; note the kernel that ran and the errors, and check these."""
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if tensors[0].device.type == "cuda" else []
    with profile(activities=activities) as profiled:
        got = both_ways(function, tensors)
    names = [event.key for event in profiled.key_averages()]
    ran = [kernel for kernel, part in _KERNELS.items() if any(part in name for name in names)]
    found["kernel"] = ", ".join(ran) or "products"
    check_errors(found, got, exact, tensors[0].dtype)


def check_errors(
    found: dict[str, Any], got: Sequence[Tensor], exact: Sequence[Tensor], dtype: torch.dtype
) -> None:
    """Note the relative error of output and gradients.

    Raises:
        AssertionError: one is beyond `TOLERANCE`, or not a number.
    """
    errors = {
        part: float((mine.double() - other).norm() / other.norm())
        for part, mine, other in zip(_PARTS, got, exact)
    }
    found |= {"worst": max(errors.values()), **errors, "tolerance": TOLERANCE[dtype]}
    assert len(got) == len(exact), "a gradient is missing"
    # Written so that an error that is not a number fails.
    assert all(error <= TOLERANCE[dtype] for error in errors.values()), "larger than the tolerance"
