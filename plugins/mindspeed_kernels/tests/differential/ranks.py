"""Operators that communicate: each rank's call is compared with its part of one formula over all ranks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from differential.case import generates_worlds, public_operators
from differential.draws import Draws, shrunk
from differential.formulas import ACTIVATIONS, parts_of, root_norm
from differential.judge import close, describe, tensors_in, tolerance_for


@dataclass
class WorldCase:
    """One call of every rank of a group.

    ``whole`` holds tensors of all ranks together. ``local`` takes such tensors and a rank, and returns the
    rank's arguments and options, as views. ``formula`` takes ``whole`` in float64 and returns the results of
    each rank. ``replicated`` results are the same everywhere and count once in a loss. ``outputs``
    makes tensors that the call writes its results to; they stand where the arguments have an ellipsis.
    ``written`` are places of arguments that must hold the first result afterwards.
    """

    whole: dict[str, torch.Tensor]
    local: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
    formula: Callable[..., list[tuple[torch.Tensor, ...]]]
    group: Any
    gradients: bool = True
    replicated: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    outputs: Callable[[int], tuple[torch.Tensor, ...]] = lambda rank: ()
    written: tuple[int, ...] = ()
    tolerance: dict[torch.dtype, float] = field(default_factory=dict)


TOLERANCE = {torch.bfloat16: 0.1, torch.float16: 2e-2}


def judge_rank(name, case, draws, device):
    """Compare this rank's call with its part of the formula; every rank of the group does so at once."""
    operator, rank = public_operators()[name], case.group.rank()
    wide = {
        key: value.double().requires_grad_(value.is_floating_point()) for key, value in case.whole.items()
    }
    expected = case.formula(**wide)
    args, options = tree_map_only(
        torch.Tensor, lambda t: t.detach().to(device), case.local(rank, **case.whole)
    )
    leaves = [t for t in tensors_in((args, options)) if t.is_floating_point()]
    if case.gradients:
        for leaf in leaves:
            leaf.requires_grad_()
    outputs = tree_map_only(torch.Tensor, lambda t: t.to(device), case.outputs(rank))
    place = args.index(...) if ... in args else len(args)
    given = (*args[:place], *outputs, *args[place + 1 :])
    with torch.set_grad_enabled(case.gradients):
        more = tree_map_only(torch.Tensor, lambda t: t.to(device), case.options)
        result = operator(*given, **options, **more)
    results = tuple(result) if isinstance(result, (list, tuple)) else (result,)
    mine = expected[rank]
    dtypes = {t.dtype for t in tensors_in((given, options)) if t.is_floating_point()}
    tolerance = tolerance_for(dtypes, {**TOLERANCE, **case.tolerance})
    assert len(results) == len(mine), f"{len(results)} results instead of {len(mine)}"
    for index, (got, wanted) in enumerate(zip(results, mine)):
        close(got, wanted, tolerance, f"result {index}")
    for index, output in enumerate(outputs):
        close(output, mine[index], tolerance, f"argument {index} that is written to")
    for index in case.written:
        close(given[index], mine[0], tolerance, f"argument {index} that is changed")
    if not case.gradients:
        return
    outers = [[draws.like(one.detach()) for one in results_of] for results_of in expected]
    ranks = range(1) if case.replicated else range(case.group.size())
    pairs = [
        (one, outer.to(results[0].dtype).double())
        for r in ranks
        for one, outer in zip(expected[r], outers[r])
        if one.requires_grad
    ]
    names = [key for key, value in wide.items() if value.requires_grad]
    found = torch.autograd.grad(
        [one for one, _ in pairs], [wide[key] for key in names], [o for _, o in pairs], allow_unused=True
    )
    gradients = dict(case.whole) | {
        key: torch.zeros_like(wide[key]) if one is None else one for key, one in zip(names, found)
    }
    wanted_args = case.local(rank, **gradients)
    wanted = [
        t for t, leaf in zip(tensors_in(wanted_args), tensors_in((args, options))) if leaf.is_floating_point()
    ]
    own = outers[0 if case.replicated else rank]
    followed = [(one, outer) for one, outer in zip(results, own) if one.requires_grad]
    got = torch.autograd.grad(
        [one for one, _ in followed],
        leaves,
        [outer.to(one.dtype).to(one.device) for one, outer in followed],
        allow_unused=True,
    )
    for leaf, one, other in zip(leaves, got, wanted):
        assert one is not None, f"argument {list(leaf.shape)} got no gradient"
        close(one, other, 2 * tolerance, f"gradient of {list(leaf.shape)}")


def run_world_case(name, generator, seed, groups, device="cpu", **draws):
    """Judge a seed on every rank; all ranks agree on whether one failed, and on the smallest failing call."""

    def attempt(choices=()):
        made = Draws(seed, choices, **draws)
        try:
            case = generator(made, groups)
            judge_rank(name, case, made, device)
            error = None
        except Exception as raised:
            error = raised
        failed = torch.tensor([float(error is not None)])
        dist.all_reduce(failed)
        return bool(failed), error, made

    failed, error, made = attempt()
    if not failed:
        return ""
    smallest = shrunk(made.choices, lambda choices: attempt(choices)[0], attempts=40)
    _, error, made = attempt(smallest)
    case = generator(Draws(seed, smallest, **draws), groups)
    args, options = case.local(case.group.rank(), **case.whole)
    described = describe(name, args, {**options, **case.options})
    return f"seed {seed} on rank {dist.get_rank()}: {described}\n{type(error).__name__}: {error}"


def part(tensor, dimension, rank, ranks):
    size = tensor.shape[dimension] // ranks
    return tensor.narrow(dimension, rank * size, size)


def sizes(draws):
    return draws.choice((2, 4, 1, 3)), draws.choice((4, 5, 8)), draws.choice((3, 1, 6))


def bias_for(draws, shape, dtype):
    return {} if draws.maybe() else {"bias": draws.tensor(*shape, dtype=dtype)}


def product_summed(draws, groups, written=False):
    group = draws.choice(groups)
    ranks, dtype = group.size(), draws.dtype()
    m, k, n = sizes(draws)
    m = draws.choice((m, 8, 0))
    whole = {"x": draws.tensor(m, k * ranks, dtype=dtype), "weight": draws.tensor(k * ranks, n, dtype=dtype)}
    whole |= bias_for(draws, draws.choice(((n,), (1, n))), dtype)

    def local(rank, x, weight, bias=None):
        mine = part(x, 1, rank, ranks), part(weight, 0, rank, ranks)
        return (*mine, ..., bias) if written else (*mine, bias), {}

    def formula(x, weight, bias=None):
        result = torch.einsum("mk,kn->mn", x, weight)
        return [(result if bias is None else result + bias.reshape(-1),)] * ranks

    return group, whole, local, formula, (m, n), dtype


def product_scattered(draws, groups, written=False):
    group = draws.choice(groups)
    ranks, dtype = group.size(), draws.dtype()
    m, k, n = sizes(draws)
    m = draws.choice((m, 8)) * ranks
    whole = {"x": draws.tensor(m, k * ranks, dtype=dtype), "weight": draws.tensor(k * ranks, n, dtype=dtype)}
    # Every rank adds a bias to its own rows.
    whole |= bias_for(draws, (ranks, n), dtype)

    def local(rank, x, weight, bias=None):
        mine = part(x, 1, rank, ranks), part(weight, 0, rank, ranks)
        own = None if bias is None else bias[rank]
        return (*mine, ..., own) if written else (*mine, own), {}

    def formula(x, weight, bias=None):
        rows = torch.einsum("mk,kn->mn", x, weight).chunk(ranks)
        return [(one if bias is None else one + bias[rank],) for rank, one in enumerate(rows)]

    return group, whole, local, formula, (m // ranks, n), dtype


def product_of_gathered(draws, groups, written=False, rows_too=True):
    group = draws.choice(groups)
    ranks, dtype = group.size(), draws.dtype()
    m, k, n = sizes(draws)
    m = draws.choice((m, 8))
    # Every rank has a weight and a bias of its own: a part of the columns.
    whole = {"x": draws.tensor(m * ranks, k, dtype=dtype), "weight": draws.tensor(ranks, k, n, dtype=dtype)}
    whole |= bias_for(draws, (ranks, n), dtype)

    def local(rank, x, weight, bias=None):
        mine, own = (part(x, 0, rank, ranks), weight[rank]), None if bias is None else bias[rank]
        return (*mine, ..., own) if written else (*mine, own), {}

    def formula(x, weight, bias=None):
        results = torch.einsum("mk,rkn->rmn", x, weight)
        if bias is not None:
            results = results + bias.unsqueeze(1)
        return [(one, x.detach()) if rows_too else (one,) for one in results]

    return group, whole, local, formula, (m * ranks, n, k), dtype


def overlapped(make, **facts):
    def generator(draws, groups):
        group, whole, local, formula, _, _ = make(draws, groups)
        named = draws.choice((group, group.group_name)) if isinstance(group.group_name, str) else group
        options = {"group": named, "parts": draws.choice((1, 2, 4, 8))}
        return WorldCase(whole, local, formula, group, options=options, **facts)

    return generator


def written_into(make, **facts):
    def generator(draws, groups):
        group, whole, local, formula, size, dtype = make(draws, groups, written=True, **facts)

        def outputs(rank):
            rows = (torch.full(size[:2], 7.0).to(dtype),)
            if len(size) == 3 and facts.get("rows_too"):
                rows += (torch.full((size[0], size[2]), 7.0).to(dtype),)
            return rows

        return WorldCase(
            whole, local, formula, group, gradients=False, options={"group": group}, outputs=outputs
        )

    return generator


generates_worlds("matmul_all_reduce")(overlapped(product_summed, replicated=True))
generates_worlds("matmul_reduce_scatter")(overlapped(product_scattered))
generates_worlds("all_gather_matmul")(overlapped(product_of_gathered))
generates_worlds("coc_ops.matmul_all_reduce")(written_into(product_summed))
generates_worlds("coc_ops.matmul_reduce_scatter")(written_into(product_scattered))
generates_worlds("coc_ops.all_gather_matmul")(written_into(product_of_gathered, rows_too=False))
generates_worlds("coc_ops.all_gather_matmul_v2")(written_into(product_of_gathered, rows_too=True))


@generates_worlds("coc_ops.pure_matmul")
def pure_matmul(draws, groups):
    case = written_into(product_summed)(draws, [group for group in groups if group.size() == 1])
    return WorldCase(case.whole, case.local, case.formula, case.group, gradients=False, outputs=case.outputs)


def norm_after_sum(written=()):
    def generator(draws, groups):
        group = draws.choice(groups)
        ranks, dtype = group.size(), draws.dtype()
        rows, k, n = draws.choice(((2, 3), (1, 1), (1, 5))), draws.choice((4, 5)), draws.choice((8, 3))
        lead = draws.choice((rows, (rows[0] * rows[1],)))
        kind = draws.choice(("floating", "floating", "eight bits", "eight bit weight", "groups"))
        numbers, weights = dtype, dtype
        if kind == "groups":
            k = 64
        if kind == "eight bits":
            numbers = weights = torch.int8
        elif kind != "floating":
            weights = torch.int8

        def made(*shape, dtype):
            if dtype == torch.int8:
                return draws.integers(-128, 127, *shape, dtype=dtype)
            return draws.tensor(*shape, dtype=dtype)

        whole = {
            "x": made(*lead, k * ranks, dtype=numbers),
            "weight": made(k * ranks, n, dtype=weights),
            "residual": draws.tensor(*rows, n, dtype=dtype, plain=True),
            "gamma": draws.tensor(n, dtype=dtype),
        }
        options = {"epsilon": draws.choice((1e-6, 1e-2))}
        if draws.maybe():
            # Every rank adds one, before the sum.
            whole["bias"] = (
                draws.integers(-99, 99, ranks, n, dtype=torch.int32)
                if kind == "eight bits"
                else draws.tensor(ranks, n, dtype=dtype)
            )
        scale = offset = None
        if kind == "eight bits":
            scale = draws.tensor(*draws.choice(((n,), (1,))), dtype=torch.float32, positive=True) / (999 * k)
            options["dequant_scale"] = scale
        elif kind == "groups":
            scale = draws.tensor(2, n, dtype=dtype) / 99
            options |= {"antiquant_scale": scale, "antiquant_group_size": 32}
        elif kind != "floating":
            scale = draws.tensor(*draws.choice(((n,), (1,))), dtype=dtype) / 99
            offset = draws.tensor(*scale.shape, dtype=dtype)
            options |= {"antiquant_scale": scale, "antiquant_offset": offset}

        def local(rank, x, weight, residual, gamma, bias=None):
            mine = part(x, -1, rank, ranks), part(weight, 0, rank, ranks)
            more = {} if bias is None else {"bias": bias[rank]}
            copied = residual.clone() if written else residual
            return (*mine, copied, gamma, group), more

        def formula(x, weight, residual, gamma, bias=None):
            wide, factor = weight.double(), 1.0
            if kind == "eight bits":
                factor = scale.double()
            elif kind == "groups":
                wide = wide * scale.double().repeat_interleave(32, 0).repeat(ranks, 1)
            elif kind != "floating":
                wide = (wide + offset.double()) * scale.double()
            product = torch.einsum("...k,kn->...n", x.double(), wide).reshape(residual.shape)
            if bias is not None:
                product = product + bias.double().sum(0)
            total = product * factor + residual
            return [(total, root_norm(total, gamma, options["epsilon"]))] * ranks

        # Products of ranks are rounded before they are summed.
        tolerance = {torch.bfloat16: 0.2, torch.float16: 4e-2}
        follow = kind == "floating" and not written
        return WorldCase(
            whole, local, formula, group, follow, True, options, written=written, tolerance=tolerance
        )

    return generator


generates_worlds("npu_mm_all_reduce_add_rms_norm")(norm_after_sum())
generates_worlds("npu_mm_all_reduce_add_rms_norm_")(norm_after_sum(written=(2,)))


@generates_worlds("npu_grouped_mat_mul_all_reduce")
def several_products(draws, groups):
    group = draws.choice(groups)
    ranks, dtype, count = group.size(), draws.dtype(), draws.integer(1, 3)
    split, k, n = draws.integer(0, 3), draws.choice((4, 5)), draws.choice((3, 6))
    rows = draws.choice((6, 1, 0))
    ends = draws.ends(rows, count)
    whole = {
        "x": draws.tensor(rows, k * ranks, dtype=dtype),
        "weight": draws.tensor(count, k * ranks, n, dtype=dtype),
    }
    whole |= bias_for(draws, (ranks, count, n), dtype)
    options = {"split_item": split}
    if split in (1, 3):
        options["group_list"] = ends

    def local(rank, x, weight, bias=None):
        mine = part(x, 1, rank, ranks)
        pieces = [mine] if split in (1, 3) else [mine[start:end] for start, end in parts_of(0, ends)]
        more = {} if bias is None else {"bias": list(bias[rank])}
        return (pieces, list(part(weight, 1, rank, ranks)), group), more

    def formula(x, weight, bias=None):
        products = [
            torch.einsum("mk,kn->mn", x[a:b], weight[e]) for e, (a, b) in enumerate(parts_of(0, ends))
        ]
        if bias is not None:
            products = [product + shift for product, shift in zip(products, bias.sum(0))]
        return [tuple(products) if split in (0, 1) else (torch.cat(products),)] * ranks

    return WorldCase(whole, local, formula, group, gradients=False, options=options)


def expert_groups(draws, groups):
    """Expert and tensor parallel groups of this rank that cross, and its ranks in both."""
    whole = max(groups, key=lambda group: group.size())
    alone = next(group for group in groups if group.size() == 1)
    pairs = [group for group in groups if 1 < group.size() < whole.size()]
    crossing = [
        (whole, alone),
        (alone, whole),
        *([tuple(pairs), tuple(reversed(pairs))] if len(pairs) == 2 else []),
    ]
    return (*draws.choice(crossing), whole)


class Layout:
    """Places of the ranks of a world among experts and tensor parallelism."""

    def __init__(self, ep, tp, world):
        self.ep, self.tp, self.ranks = ep.size(), tp.size(), world.size()
        ranks = dist.get_process_group_ranks
        both = sorted(ranks(tp))
        # Tensor parallel neighbours are behind one another, or as far apart as there are experts' ranks.
        self._near = self.tp == 1 or both[1] - both[0] == 1

    def place(self, rank):
        return (rank // self.tp, rank % self.tp) if self._near else (rank % self.ep, rank // self.ep)


@generates_worlds("npu_alltoall_allgather_bmm")
def to_experts(draws, groups):
    ep, tp, world = expert_groups(draws, groups)
    layout, dtype, shard = Layout(ep, tp, world), draws.dtype(), draws.integer(0, 1)
    own, capacity = draws.integer(1, 2), draws.choice((1, 2, 3)) * tp.size()
    h, m = draws.choice((1, 3)) * tp.size(), draws.choice((2, 3)) * tp.size()
    experts = own * ep.size()
    name = draws.choice(("None", "relu", "gelu", "SiLU", "fastgelu"))
    options = {"shard_type": shard, "act_type": name}
    options |= {"need_allgather_out": draws.maybe(), "need_activation_feature": draws.maybe()}
    whole = {
        "x": draws.tensor(ep.size(), experts, capacity, h, dtype=dtype),
        "weight": draws.tensor(experts, h, m, dtype=dtype),
    }
    whole |= bias_for(draws, draws.choice(((experts, m), (experts, 1, m))), dtype)

    def local(rank, x, weight, bias=None):
        e, t = layout.place(rank)
        mine = part(x[e], 2 if shard == 0 else 1, t, tp.size())
        columns = part(part(weight, 0, e, ep.size()), 2, t, tp.size())
        more = {} if bias is None else {"bias": part(part(bias, 0, e, ep.size()), -1, t, tp.size())}
        return (mine, columns, ep, ep.size(), tp, tp.size()), more

    def formula(x, weight, bias=None):
        results = []
        for rank in range(world.size()):
            e, t = layout.place(rank)
            mine = range(e * own, (e + 1) * own)
            # Rows of an expert: by source, then in order; capacity that is cut is joined within a source.
            rows = torch.stack([torch.cat([x[s, i] for s in range(ep.size())]) for i in mine])
            product = torch.einsum("erh,ehm->erm", rows, part(weight[list(mine)], 2, t, tp.size()))
            if bias is not None:
                shift = part(bias.reshape(experts, 1, m)[list(mine)], 2, t, tp.size())
                product = product + shift
            result = product if name == "None" else ACTIVATIONS[name.lower()](product)
            empty = x.new_empty(0)
            gathered = rows if options["need_allgather_out"] else empty
            results.append((result, gathered, product if options["need_activation_feature"] else empty))
        return results

    return WorldCase(whole, local, formula, world, options=options)


@generates_worlds("npu_bmm_reducescatter_alltoall")
def from_experts(draws, groups):
    ep, tp, world = expert_groups(draws, groups)
    layout, dtype, shard = Layout(ep, tp, world), draws.dtype(), draws.integer(0, 1)
    own, capacity = draws.integer(1, 2), draws.choice((1, 2, 3)) * tp.size()
    h, m = draws.choice((1, 3)) * tp.size(), draws.choice((2, 3)) * tp.size()
    experts = own * ep.size()
    whole = {
        "x": draws.tensor(experts, ep.size(), capacity, m, dtype=dtype),
        "weight": draws.tensor(experts, m, h, dtype=dtype),
    }
    width = h // tp.size() if shard == 0 else h
    # Every tensor parallel rank adds a bias to what it is left with.
    whole |= bias_for(draws, (tp.size(), experts, *draws.choice(((), (1,))), width), dtype)

    def local(rank, x, weight, bias=None):
        e, t = layout.place(rank)
        rows = part(part(x, 0, e, ep.size()), 3, t, tp.size()).flatten(1, 2)
        more = {} if bias is None else {"bias": part(bias[t], 0, e, ep.size())}
        return (
            rows,
            part(part(weight, 0, e, ep.size()), 1, t, tp.size()),
            ep,
            ep.size(),
            tp,
            tp.size(),
        ), more

    def formula(x, weight, bias=None):
        product = torch.einsum("escm,emh->esch", x, weight)
        results = []
        for rank in range(world.size()):
            e, t = layout.place(rank)
            mine = part(product[:, e], 2 if shard == 0 else 1, t, tp.size())
            results.append((mine if bias is None else mine + bias[t].reshape(experts, 1, width),))
        return results

    return WorldCase(whole, local, formula, world, options={"shard_type": shard})


def exchanged_product(to_experts):
    """Rows of tokens sent to experts and multiplied there, or of experts multiplied and sent back."""

    def generator(draws, groups):
        group = draws.choice(groups)
        ranks, dtype, experts = group.size(), draws.dtype(), draws.integer(1, 3)
        k, n = draws.choice((4, 5)), draws.choice((3, 1, 6))
        every = [(t, r, e) for t in range(ranks) for r in range(ranks) for e in range(experts)]
        counts = {place: draws.choice((2, 1, 0, 5)) for place in every}
        by_tokens = [[place for place in every if place[0] == rank] for rank in range(ranks)]
        by_experts = [
            sorted((p for p in every if p[1] == rank), key=lambda p: (p[2], p[0])) for rank in range(ranks)
        ]
        given, returned = (by_tokens, by_experts) if to_experts else (by_experts, by_tokens)
        sizes_of = [sum(counts[place] for place in places) for places in given]
        whole = {
            "x": draws.tensor(sum(sizes_of), k, dtype=dtype),
            "weight": draws.tensor(ranks, experts, k, n, dtype=dtype),
        }
        if draws.maybe():
            whole |= {"shared": draws.tensor(ranks, 2, 3, dtype=dtype)}
            whole |= {"dense": draws.tensor(ranks, 3, 4, dtype=dtype)}
        tensors = draws.maybe()

        def local(rank, x, weight, shared=None, dense=None):
            mine = [counts[rank, r, e] for r in range(ranks) for e in range(experts)]
            own = [counts[t, rank, e] for t in range(ranks) for e in range(experts)]
            numbers = (mine, own) if to_experts else (own, mine)
            numbers = tuple(torch.tensor(one) for one in numbers) if tensors else numbers
            more = () if shared is None else (shared[rank], dense[rank])
            return (x.split(sizes_of)[rank], weight[rank], group, *numbers, *more), {}

        def formula(x, weight, shared=None, dense=None):
            order = [place for places in given for place in places]
            pieces = dict(zip(order, x.split([counts[place] for place in order])))
            results = []
            for rank, places in enumerate(returned):
                result = torch.cat([torch.einsum("mk,kn->mn", pieces[p], weight[p[1], p[2]]) for p in places])
                results.append((result,) if shared is None else (result, shared[rank] @ dense[rank]))
            return results

        return WorldCase(whole, local, formula, group)

    return generator


generates_worlds("all2all_grouped_matmul")(exchanged_product(to_experts=True))
generates_worlds("grouped_matmul_all2all")(exchanged_product(to_experts=False))
