"""Products of groups of rows, accumulation of weight gradients, feed-forward layers."""

import torch

from differential.case import Case, generates
from differential.formulas import ACTIVATIONS, grouped, owners, parts_of

HALF = {torch.bfloat16: 0.1, torch.float16: 2e-2}
"""Limits where products are rounded between two of them."""


def groups_of(draws, most=5):
    """Rows, and where each of some groups ends."""
    rows = draws.size(0)
    return rows, draws.ends(rows, draws.integer(1, most))


def counts_of(ends):
    return torch.tensor([end - start for start, end in parts_of(0, ends)], dtype=torch.int64)


@generates("grouped_matmul")
def grouped_matmul(draws):
    dtype, (rows, ends) = draws.dtype(), groups_of(draws)
    k, n = draws.size(), draws.size()
    x, weight = draws.tensor(rows, k, dtype=dtype), draws.tensor(len(ends), k, n, dtype=dtype)
    parameter = ()
    if draws.maybe() and not draws.checkable:
        weight = torch.empty_like(weight, memory_format=torch.contiguous_format).copy_(weight)
        weight.main_grad = True
        parameter = (weight,)

    def formula(x, weight, ends, parameter=None):
        return (grouped(x, weight, ends.tolist()),)

    return Case((x, weight, torch.tensor(ends), *parameter), formula)


def gmm(counts):
    def generator(draws):
        dtype, (rows, ends) = draws.dtype(), groups_of(draws)
        k, n = draws.size(), draws.size()
        given = counts_of(ends) if counts else draws.choice((ends, torch.tensor(ends)))
        if len(ends) == 1 and draws.maybe():
            given = None
        options = {"group_list": given}
        if draws.maybe() and not draws.checkable:
            args = draws.tensor(k, rows, dtype=dtype), draws.tensor(rows, n, dtype=dtype)
            options["group_type"] = 2

            def summed(x, weight, **others):
                by_row = torch.einsum("km,mn->mkn", x, weight)
                return (x.new_zeros(len(ends), k, n).index_add(0, owners(ends), by_row),)

            return Case(args, summed, options, gradients=False)
        x, weight = draws.tensor(rows, k, dtype=dtype), draws.tensor(len(ends), k, n, dtype=dtype)
        if draws.maybe():
            options["bias"] = draws.tensor(len(ends), n, dtype=dtype)
        if draws.maybe() and not draws.checkable:
            weight = torch.empty_like(weight, memory_format=torch.contiguous_format).copy_(weight)
            weight.main_grad = True
            options |= {"gemm_fusion": True, "original_weight": weight}

        def formula(x, weight, bias=None, **others):
            result = grouped(x, weight, ends)
            return (result if bias is None else result + bias[owners(ends)],)

        return Case((x, weight), formula, options, frozen=("bias",))

    return generator


generates("npu_gmm")(gmm(counts=False))
generates("npu_gmm_v2")(gmm(counts=True))


def summing_dtypes(draws):
    """Of operands, and of the gradient they are added to."""
    dtype = draws.dtype()
    return dtype, draws.choice((torch.promote_types(dtype, torch.float32), dtype))


@generates("npu_matmul_add_fp32")
def matmul_add(draws):
    dtype, wide = summing_dtypes(draws)
    m, k, n = draws.size(0), draws.size(), draws.size()
    args = draws.tensor(m, k, dtype=dtype), draws.tensor(m, n, dtype=dtype)
    grad = draws.tensor(n, k, dtype=wide, plain=True)

    def formula(x, dy, grad):
        return (grad + torch.einsum("mk,mn->nk", x, dy),)

    return Case((*args, grad), formula, gradients=False, changed=2, dtypes=(wide,))


@generates("npu_groupmatmul_add_fp32")
def groupmatmul_add(draws):
    dtype, wide = summing_dtypes(draws)
    (rows, ends), k, n = groups_of(draws), draws.size(), draws.size()
    args = draws.tensor(rows, k, dtype=dtype), draws.tensor(rows, n, dtype=dtype)
    grad = draws.tensor(len(ends), k, n, dtype=wide, plain=True)
    if draws.maybe():
        grad = grad.reshape(len(ends) * k, n).contiguous()

    def formula(x, dy, grouplist, grad):
        by_row = torch.einsum("mk,mn->mkn", x, dy)
        return (grad + x.new_zeros(len(ends), k, n).index_add(0, owners(ends), by_row).reshape(grad.shape),)

    given = draws.choice((ends, torch.tensor(ends)))
    return Case((*args, given, grad), formula, gradients=False, changed=3, dtypes=(wide,))


GATES = {"geglu": "gelu", "swiglu": "silu", "reglu": "relu"}


def activated(name, x):
    name = name.lower()
    if name in GATES:
        half = x.shape[-1] // 2
        return ACTIVATIONS[GATES[name]](x[..., :half]) * x[..., half:]
    return ACTIVATIONS[name](x)


@generates("npu_ffn")
def ffn(draws):
    experts = draws.choice((0, 0, 2, 3, 5))
    quantized = "none" if draws.checkable else draws.choice(("none", "none", "weights", "all"))
    dtype = draws.choice([d for d in draws.dtypes if quantized != "all"] or [torch.int8])
    plain = ["gelu", "fastgelu", "silu", "relu", "GELU"]
    name = draws.choice(plain if experts else [*plain, "swiglu", "geglu", "reglu"])
    (rows, ends), k1, k2, n2 = groups_of(draws, 1), draws.size(), draws.size(), draws.size()
    n1 = 2 * k2 if name in GATES else k2
    of = (experts,) if experts else ()
    sizes = {"1": (*of, k1, n1), "2": (*of, k2, n2)}
    options = {"inner_precise": draws.choice((0, None))} if draws.maybe() else {}
    shape = (rows,)
    if experts:
        ends = draws.ends(rows, experts)
        given, option = draws.choice(
            ((counts_of(ends), "expert_tokens"), (torch.tensor(ends), "expert_tokens_index"))
        )
        options[option] = draws.choice((given, given.tolist()))
    elif draws.maybe():
        shape = (1, rows)
    dtypes = None
    if quantized == "none":
        weights = [draws.tensor(*sizes[which], dtype=dtype) for which in "12"]
    else:
        weights = [draws.integers(-128, 127, *sizes[which], dtype=torch.int8) for which in "12"]
    x = draws.integers(-128, 127, *shape, k1, dtype=torch.int8) if quantized == "all" else None
    if quantized == "all":
        for which, size in sizes.items():
            options[f"deq_scale{which}"] = (
                draws.tensor(*of, size[-1], dtype=torch.float32, positive=True) / 512
            )
        per = draws.choice(((1,), (n1,))) if not experts else draws.choice(((experts,), (experts, n1)))
        if name in GATES:
            per = (1,)
        options["scale"] = draws.tensor(*per, dtype=torch.float32, positive=True)
        if draws.maybe():
            options["offset"] = draws.tensor(experts or 1, dtype=torch.float32)
        wanted = draws.choice((None, torch.float16, torch.bfloat16))
        if wanted is not None:
            options["output_dtype"] = wanted
        dtypes = (wanted or torch.float16,)
        for which, size in sizes.items():
            if draws.maybe():
                options[f"bias{which}"] = draws.integers(-99, 99, *of, size[-1], dtype=torch.int32)
    else:
        x = draws.tensor(*shape, k1, dtype=dtype)
        for which, size in sizes.items():
            if quantized == "weights":
                options[f"antiquant_scale{which}"] = draws.tensor(*of, size[-1], dtype=dtype) / 64
                if draws.maybe():
                    options[f"antiquant_offset{which}"] = draws.tensor(*of, size[-1], dtype=dtype)
            if draws.maybe():
                options[f"bias{which}"] = draws.tensor(*of, size[-1], dtype=dtype)

    def formula(x, weight1, weight2, activation, **given):
        rows, group = x.reshape(-1, x.shape[-1]).double(), owners(ends) if experts else None

        def by_row(table):
            return table if group is None else table[group]

        def product(values, which, weight):
            weight = weight.double()
            if quantized == "weights":
                offset = given.get(f"antiquant_offset{which}")
                offset = 0.0 if offset is None else offset.double().unsqueeze(-2)
                weight = (weight + offset) * given[f"antiquant_scale{which}"].unsqueeze(-2)
            result = (
                torch.einsum("mk,kn->mn", values, weight) if group is None else grouped(values, weight, ends)
            )
            bias = given.get(f"bias{which}")
            result = result if bias is None else result + by_row(bias).double()
            return result * by_row(given[f"deq_scale{which}"]) if quantized == "all" else result

        hidden = activated(activation, product(rows, "1", weight1))
        if quantized == "all":

            def spread(table):
                return table if group is None else table.reshape(experts, -1)[group]

            hidden = hidden * spread(given["scale"])
            if "offset" in given:
                hidden = hidden + spread(given["offset"])
            hidden = hidden.round().clamp(-128, 127)
        result = product(hidden, "2", weight2)
        return (result.reshape(*x.shape[:-1], weight2.shape[-1]),)

    return Case(
        (x, *weights, name), formula, options, gradients=quantized == "none", dtypes=dtypes, tolerance=HALF
    )
