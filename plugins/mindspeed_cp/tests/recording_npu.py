"""``torch_npu`` with the attention operators alone: they check their arguments, compute by products, and
remember what was asked.

What a kernel would compute wrongly or refuse, an assertion refuses here. Names, order, types and defaults of
arguments are those of the schemas that are recorded for the conformance tests. Rows that see no key get
nonsense, as on a device.
"""

import json
import sys
import types
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

SCHEMAS = Path(__file__).resolve().parents[3] / "tests" / "npu_conformance" / "schemas.json"

UNLIMITED = 2147483647
FLOATING = (torch.float32, torch.float16, torch.bfloat16)
LANES = 8
CALLS: Counter = Counter()
"""Calls by operator, layout and sparse mode."""


def heads_apart(tensor, layout, heads):
    """``[b, n, s, d]`` of a tensor in a layout."""
    assert tensor.is_contiguous()
    if layout == "BNSD":
        assert tensor.dim() == 4
        return tensor
    assert layout == "SBH", layout
    assert tensor.dim() == 3
    assert tensor.shape[2] % heads == 0
    return tensor.unflatten(2, (heads, -1)).permute(1, 2, 0, 3)


def in_layout(tensor, layout):
    """``[b, n, s, d]`` brought to a layout."""
    return tensor.contiguous() if layout == "BNSD" else tensor.permute(2, 0, 1, 3).flatten(2).contiguous()


def visible(mode, mask, pre, following, queries, keys):
    """``[q, k]``: which scores count, and that mode, mask and limits go together."""
    if mode == 0:
        assert mask is None
        assert (pre, following) == (UNLIMITED, UNLIMITED)
        return torch.ones(queries, keys, dtype=torch.bool)
    assert mask is not None
    assert mask.dtype in (torch.bool, torch.uint8)
    if mode == 1:
        assert tuple(mask.shape) == (queries, keys)
        assert not mask.bool().all(), "nothing of this is seen"
        return ~mask.bool()
    assert mode in (3, 4), mode
    assert torch.equal(mask.bool(), torch.ones(2048, 2048, dtype=torch.bool).triu(1))
    diagonal = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)[None]
    if mode == 3:
        assert (pre, following) == (UNLIMITED, UNLIMITED)
        assert queries == keys
        return key <= diagonal
    assert pre >= 0
    assert following >= 0
    seen = (key >= diagonal - pre) & (key <= diagonal + following)
    assert seen.any(1).all()
    return seen


def scores_of(query, key, value, head_num, layout, options):
    """Queries, keys and values ``[b, n, s, d]``, their scores, which rows see none, heads of keys."""
    assert query.dtype == key.dtype == value.dtype
    assert query.dtype in FLOATING
    assert query.device == key.device == value.device
    q = heads_apart(query, layout, head_num)
    width = q.shape[3]
    groups = key.shape[1] if layout == "BNSD" else key.shape[2] // width
    k, v = heads_apart(key, layout, groups), heads_apart(value, layout, groups)
    assert q.shape[1] == head_num <= 256
    assert head_num % groups == 0
    assert k.shape[3] == width <= 768
    assert v.shape[3] <= width
    assert q.shape[0] == k.shape[0] == v.shape[0]
    assert k.shape[2] == v.shape[2]
    assert all(0 < tensor.shape[2] <= 1 << 20 for tensor in (q, k))
    share = head_num // groups
    q, k, v = q.double(), *(tensor.double().repeat_interleave(share, 1) for tensor in (k, v))
    seen = visible(options["mode"], options["mask"], *options["limits"], q.shape[2], k.shape[2])
    products = q @ k.transpose(-1, -2) * options["scale"] + bias_of(q, k, options)
    return (q, k, v), products.masked_fill(~seen, float("-inf")), ~seen.any(1), groups


def bias_of(q, k, options):
    """The bias by distance from slopes, of as many queries as keys."""
    slopes = options.get("pse")
    if slopes is None:
        return 0.0
    assert options["pse_type"] == 2
    assert (slopes.dtype, tuple(slopes.shape)) == (torch.float32, (q.shape[1],))
    assert q.shape[2] == k.shape[2]
    (first,), (start,) = options["starts"]
    distance = torch.arange(q.shape[2])[:, None] + first - torch.arange(k.shape[2])[None] - start
    return -slopes.double().view(-1, 1, 1) * distance.abs()


UNUSED = (
    *("padding_mask", "prefix", "actual_seq_qlen", "actual_seq_kvlen", "sink", "dropout_mask", "softmax_in"),
    *("query_rope", "key_rope"),
)
"""Arguments that nothing here gives."""
KINDS = {"Tensor": torch.Tensor, "int": int, "float": float, "str": str, "bool": bool, "int[]": list}


def bound(schema, args, given):
    """Arguments by name, with defaults, of a call that keeps a schema."""
    found = {}
    positional = [argument for argument in schema.arguments if not argument.kwarg_only]
    assert len(args) <= len(positional)
    given = dict(given, **{argument.name: value for argument, value in zip(positional, args)})
    for argument in schema.arguments:
        kind = str(argument.type).removeprefix("Optional[").removesuffix("]")
        kind = {"List[int": "int[]", "List[int]": "int[]"}.get(kind, kind)
        if argument.name in given:
            value = given.pop(argument.name)
            assert value is None or isinstance(value, KINDS[kind]), (argument.name, value)
        else:
            assert argument.has_default_value(), f"{argument.name} is missing"
            value = argument.default_value
        found[argument.name] = value
    assert not given, f"there are no arguments {sorted(given)}"
    return found


def options_of(a):
    """Return what decides about the scores, under one name for both versions of the kernel."""
    assert all(a.get(name) is None for name in UNUSED)
    assert a["keep_prob"] == 1.0
    assert a["inner_precise"] == 0
    assert (a["seed"], a["offset"], a.get("numels", 0)) == (0, 0, 0)
    limits = [
        a.get(name, a.get(name.replace("tockens", "tokens"))) for name in ("pre_tockens", "next_tockens")
    ]
    return {
        "mode": a["sparse_mode"],
        "mask": a["atten_mask"],
        "scale": a.get("scale", a.get("scale_value")),
        "limits": limits,
        "pse": a["pse"],
        "pse_type": a.get("pse_type", 1),
        "starts": (a.get("q_start_idx"), a.get("kv_start_idx")),
    }


def forward(name, a):
    """Context, maximum and sum as the kernels return them."""
    options, layout = options_of(a), a["input_layout"]
    CALLS[name, layout, options["mode"]] += 1
    query = a["query"]
    (_, _, v), products, empty, _ = scores_of(query, a["key"], a["value"], a["head_num"], layout, options)
    highest = products.amax(-1, keepdim=True)
    weights = (products - highest).exp()
    total = weights.sum(-1, keepdim=True)
    context = (weights / total @ v).masked_fill(empty[:, None], 777.0)
    highest, total = (number.masked_fill(empty[:, None], 3.0) for number in (highest, total))
    context = in_layout(context.to(query.dtype), layout)
    numbers = (number.float().expand(*number.shape[:3], LANES).contiguous() for number in (highest, total))
    return (context, *numbers, query.new_empty(0), 0, 0, 0)


def backward(name, a):
    """Gradients of queries, keys and values from the numbers that are given, and of what was not given."""
    options, layout, heads = options_of(a), a["input_layout"], a["head_num"]
    CALLS[name, layout, options["mode"]] += 1
    query = a["query"]
    (q, k, v), products, _, groups = scores_of(query, a["key"], a["value"], heads, layout, options)
    maximum, total = a["softmax_max"], a["softmax_sum"]
    for number in (maximum, total):
        assert (tuple(number.shape), number.dtype) == ((*q.shape[:3], LANES), torch.float32)
        assert number.is_contiguous()
        assert torch.equal(number, number[..., :1].expand_as(number))
    assert bool((total > 0).all())
    assert a["dy"].dtype == a["attention_in"].dtype == query.dtype
    outer, joined = (heads_apart(a[name], layout, heads).double() for name in ("dy", "attention_in"))
    assert outer.shape == joined.shape == (*q.shape[:3], v.shape[3])
    logsum = maximum[..., :1].double() + total[..., :1].double().log()
    weights = (products - logsum).exp()
    delta = (outer * joined).sum(-1, keepdim=True)
    inner = weights * (outer @ v.transpose(-1, -2) - delta) * options["scale"]
    share = heads // groups
    found = (
        inner @ k,
        (inner.transpose(-1, -2) @ q).unflatten(1, (groups, share)).sum(2),
        (weights.transpose(-1, -2) @ outer).unflatten(1, (groups, share)).sum(2),
    )
    found = tuple(in_layout(tensor.to(query.dtype), layout) for tensor in found)
    return (*found, None, None, None, None) if name.endswith("v2") else (*found, None, None)


def update(name, a):
    """Two attentions over other keys joined."""
    assert (a["input_layout"], a["input_softmax_layout"], a["actual_seq_qlen"]) == ("SBH", "", None)
    CALLS[name, "SBH", 0] += 1
    numbers = {part: a[part] for part in a if "softmax_m" in part or "softmax_s" in part}
    outputs = a["prev_attn_out"], a["cur_attn_out"]
    assert outputs[0].shape == outputs[1].shape
    assert {tensor.dtype for tensor in outputs} == {torch.float32}
    batch, heads, length, _ = a["prev_softmax_max"].shape
    assert (length, batch) == tuple(outputs[0].shape[:2])
    for number in numbers.values():
        assert (tuple(number.shape), number.dtype) == ((batch, heads, length, LANES), torch.float32)
        assert number.is_contiguous()
    highest = torch.maximum(numbers["prev_softmax_max"], numbers["cur_softmax_max"])
    before, now = (
        numbers[f"{side}_softmax_sum"] * (numbers[f"{side}_softmax_max"] - highest).exp()
        for side in ("prev", "cur")
    )
    total = before + now
    shape = (length, batch, heads, -1)
    parts = (
        tensor.view(shape) * (weight / total)[..., 0].permute(2, 0, 1).unsqueeze(-1)
        for tensor, weight in zip(outputs, (before, now))
    )
    return sum(parts).flatten(2), highest, total


COMPUTE = {
    "npu_fusion_attention": forward,
    "npu_fusion_attention_v2": forward,
    "npu_fusion_attention_grad": backward,
    "npu_fusion_attention_grad_v2": backward,
    "npu_ring_attention_update": update,
}


def module():
    """A module ``torch_npu`` whose operators keep the recorded schemas."""
    found = types.ModuleType("torch_npu")
    recorded = json.loads(SCHEMAS.read_text())

    def call(name, schema, *args, **given):
        return COMPUTE[name](name, bound(schema, args, given))

    for name in COMPUTE:
        (text, *_), *_ = [value for key, value in _entries(recorded) if key == f"torch_npu.{name}"]
        schema = torch._C.parse_schema(text[: text.rindex(")") + 1])
        setattr(found, name, partial(call, name, schema))
    return found


def _entries(recorded):
    for key, value in recorded.items():
        if isinstance(value, dict):
            yield from _entries(value)
        else:
            yield key, value


@contextmanager
def recording():
    """Serve tensors on the host by the code for NPUs, and that by the operators above."""
    from mindspeed_cp.engine.kernels import using
    from mindspeed_cp.engine.kernels.npu import NpuKernel
    from mindspeed_kernels import ops

    assert "torch_npu" not in sys.modules
    sys.modules["torch_npu"] = module()
    chosen = ("npu_fusion_attention", "npu_fusion_attention_grad", "npu_ring_attention_update")
    for name in chosen:
        operator = ops.OPERATORS[name]
        operator.add(replace(operator.backends["npu"], name="recorded", devices=("cpu",)))
    try:
        with ops.use(**dict.fromkeys(chosen, "recorded")), using(NpuKernel(devices=("cpu",))):
            yield CALLS
    finally:
        for name in chosen:
            ops.OPERATORS[name].remove("recorded")
        del sys.modules["torch_npu"]
