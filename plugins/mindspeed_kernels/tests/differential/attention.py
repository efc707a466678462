"""Fused attention, its gradients, and causal attention by blocks, against a formula by whole matrices."""

import torch

from differential.case import Case, generates
from differential.formulas import masked_softmax

UNLIMITED = 2147483647
TOLERANCE = {torch.bfloat16: 0.12, torch.float16: 2e-2}
LAYOUTS = ("BNSD", "SBH", "BSH", "BSND", "SBND")
ORDERS = {
    "BNSD": (0, 1, 2, 3),
    "BSND": (0, 2, 1, 3),
    "SBND": (2, 0, 1, 3),
    "BSH": (0, 2, 1, 3),
    "SBH": (2, 0, 1, 3),
}


def to_heads(tensor, layout, heads):
    """``[b, n, s, d]`` of a layout."""
    if layout == "TND":
        return tensor.transpose(0, 1).unsqueeze(0)
    if layout in ("SBH", "BSH"):
        tensor = tensor.reshape(*tensor.shape[:2], heads, tensor.shape[2] // heads)
    order = ORDERS[layout]
    return tensor.permute(*(order.index(place) for place in range(4)))


def from_heads(tensor, layout):
    if layout == "TND":
        return tensor[0].transpose(0, 1)
    laid = tensor.permute(*ORDERS[layout])
    return laid.flatten(2) if layout in ("SBH", "BSH") else laid


def seen_by(mode, sq, sk, pre, following, prefix, mask):
    """Return the keys that each query sees in one sequence, ``[b | 1, n | 1, sq, sk]``."""
    row, column = torch.arange(sq)[:, None], torch.arange(sk)[None]
    corner = row + sk - sq
    anything = torch.ones(sq, sk, dtype=torch.bool)
    if mode == 0:
        if mask is None:
            return anything[None, None]
        near = (row - column <= pre) & (column - row <= following)
        return near & (mask == 0)
    if mode == 1:
        return anything[None, None] if mask is None else mask == 0
    if mode == 2:
        return (column <= row)[None, None]
    if mode == 3:
        return (column <= corner)[None, None]
    if mode == 4:
        return ((corner - column <= pre) & (column - corner <= following))[None, None]
    leading = torch.tensor(prefix).reshape(-1, 1, 1, 1)
    return (column <= corner)[None, None] | (column < leading)


def attend(q, k, v, visible, scale, bias=None, before_scale=False, sink=None, kept=None, keep_prob=1.0):
    """Context and logarithm of the sums of ``[b, n, sq, d]``, with keys of fewer heads."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (
        torch.cat([t[:, g : g + 1].expand(-1, repeats, -1, -1) for g in range(t.shape[1])], 1) for t in (k, v)
    )
    scores = torch.einsum("bnid,bnjd->bnij", q, k)
    if bias is not None and before_scale:
        scores = scores + bias
    scores = scores * scale
    if bias is not None and not before_scale:
        scores = scores + bias
    visible = visible.expand(scores.shape)
    if sink is not None:
        further = sink.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, further), -1)
        visible = torch.cat((visible, torch.ones_like(visible[..., :1])), -1)
    weights = masked_softmax(scores, visible)
    hidden = torch.where(visible, scores, torch.full_like(scores, float("-inf")))
    logsum = torch.logsumexp(hidden.detach(), -1)
    weights = weights[..., : k.shape[2]]
    if kept is not None:
        weights = weights * kept.double() / keep_prob
    return torch.einsum("bnij,bnjd->bnid", weights, v), logsum


def bias_of(pse, pse_type, sq, sk, start):
    if pse is None or pse_type in (0, 1):
        return pse
    distance = (torch.arange(sq)[:, None] + start - torch.arange(sk)).abs().double()
    slopes = pse.reshape(-1, pse.shape[-1], 1, 1)
    return -slopes * (distance.sqrt() if pse_type == 3 else distance)


def whole(q, k, v, heads, layout, **given):
    """Context in the layout, and logarithm of the sums ``[b, n, sq]`` or ``[t, n]``."""
    width = to_heads(q, layout, heads).shape[3]
    groups = k.shape[-1] // width if layout in ("SBH", "BSH") else to_heads(k, layout, 0).shape[1]
    q, k, v = (to_heads(t, layout, n) for t, n in ((q, heads), (k, groups), (v, groups)))
    mode, kind = given.get("sparse_mode", 0), given.get("pse_type", 1)
    limits = given.get("pre_tokens", UNLIMITED), given.get("next_tokens", UNLIMITED)
    options = {"scale": given.get("scale", 1.0), "before_scale": kind == 1, "sink": given.get("sink")}
    options["keep_prob"] = given.get("keep_prob", 1.0)
    start = given.get("q_start_idx", [0])[0] - given.get("kv_start_idx", [0])[0]
    if layout != "TND":
        sq, sk = q.shape[2], k.shape[2]
        visible = seen_by(mode, sq, sk, *limits, given.get("prefix"), given.get("atten_mask"))
        bias = bias_of(given.get("pse"), kind, sq, sk, start)
        context, logsum = attend(q, k, v, visible, bias=bias, kept=given.get("dropout_mask"), **options)
        return from_heads(context, layout), logsum
    contexts, sums = [], []
    row = column = 0
    ends = list(zip(given["actual_seq_qlen"], given["actual_seq_kvlen"]))
    used = [pair for pair in ends if pair != (0, 0)] if ends[-1] == (0, 0) else ends
    filled = [i for i, (end, _) in enumerate(used) if end > (used[i - 1][0] if i else 0)]
    for index, (row_end, column_end) in enumerate(used):
        sq, sk = row_end - row, column_end - column
        own = mode
        if mode in (7, 8):
            single = filled[-1] if mode == 7 else filled[0]
            own = 4 if index == single else {7: 3, 8: 2}[mode]
        prefix = given.get("prefix")
        visible = seen_by(own, sq, sk, *limits, prefix and prefix[index], None)
        parts = q[:, :, row:row_end], k[:, :, column:column_end], v[:, :, column:column_end]
        if sq:
            context, logsum = attend(*parts, visible, **options)
            contexts.append(context[0].transpose(0, 1))
            sums.append(logsum[0].transpose(0, 1))
        row, column = row_end, column_end
    rest = q.shape[2] - row
    contexts.append(q.new_zeros(rest, heads, v.shape[3]))
    sums.append(q.new_full((rest, heads), float("-inf")))
    return torch.cat(contexts), torch.cat(sums)


def laid_out(draws, layout, *sizes, dtype):
    """A tensor ``[b, n, s, d]`` in a layout, in some memory order."""
    batch, heads, length, width = sizes
    shape = {"TND": (length, heads, width), "SBH": (length, batch, heads * width)}.get(layout)
    if shape is None:
        shape = from_heads(torch.empty(sizes), layout).shape
    return draws.tensor(*shape, dtype=dtype)


def call(draws, dropped=True):
    """Arguments and options of attention that is not packed."""
    dtype, layout = draws.dtype(), draws.choice(LAYOUTS)
    groups, share = draws.choice(((1, 1), (2, 1), (1, 3), (2, 2)))
    batch, sq, sk = draws.integer(1, 3), draws.size(), draws.size()
    if draws.choice((True, False)):
        sk = sq
    if draws.choice((False, False, False, True)) and not draws.checkable:
        batch = 0
    width = draws.choice((4, 8, 5)) if not draws.checkable else 2
    narrow = draws.choice((width, max(1, width - 2)))
    heads, mode = groups * share, draws.integer(0, 6)
    options = {"sparse_mode": mode, "scale": draws.choice((1.0, 0.35))}
    if mode in (0, 4) and draws.choice((True, False)):
        pre = draws.choice((UNLIMITED, 2, 0, 9, -1, -3))
        options |= {"pre_tokens": pre, "next_tokens": draws.integer(max(-3, -pre), 9)}
    if mode in (0, 1) and draws.choice((True, False)):
        shape = draws.choice(((sq, sk), (1, 1, sq, sk), (batch, 1, sq, sk), (batch, heads, sq, sk)))
        hidden = draws.integers(0, 9, *shape) < draws.choice((2, 7))
        options["atten_mask"] = hidden if draws.choice((True, False)) else hidden.to(torch.uint8)
    if mode in (5, 6):
        options["prefix"] = [draws.integer(max(0, sk - sq), sk) for _ in range(batch)]
    kind = draws.choice(("none", "none", "tensor", "row", "slopes", "roots"))
    frozen = ()
    if kind in ("tensor", "row"):
        shape = draws.choice((1, max(batch, 1))), heads, sq if kind == "tensor" else 1, sk
        options |= {"pse": draws.tensor(*shape, dtype=dtype, plain=True), "pse_type": draws.integer(0, 1)}
    elif kind != "none":
        options["pse"] = draws.tensor(heads, dtype=torch.float32, positive=True, plain=True)
        options |= {"pse_type": 3 if kind == "roots" else 2, "q_start_idx": [draws.integer(0, 5)]}
        options["kv_start_idx"] = [draws.integer(0, 5)]
        frozen = ("pse",)
    if draws.maybe():
        options["sink"] = draws.tensor(heads, dtype=dtype, plain=True)
    if dropped and draws.maybe():
        options["dropout_mask"] = draws.integers(0, 9, batch, heads, sq, sk) < 6
        options["keep_prob"] = 0.6
    sizes = (heads, sq, width), (groups, sk, width), (groups, sk, narrow)
    q, k, v = (laid_out(draws, layout, batch, *size, dtype=dtype) for size in sizes)
    return (q, k, v, heads, layout), options, frozen


def packed_call(draws):
    """Arguments and options of packed sequences."""
    dtype = draws.dtype()
    groups, share = draws.choice(((1, 1), (2, 1), (1, 3)))
    mode = draws.choice((0, 1, 2, 3, 4, 6, 7, 8))
    lengths = [(draws.integer(1, 5), draws.integer(1, 6))]
    for _ in range(draws.integer(0, 3)):
        sq = draws.integer(0, 5)
        lengths.append((sq, draws.choice((sq, max(1, sq) + draws.integer(0, 3)))))
    ends = [[sum(pair[side] for pair in lengths[: i + 1]) for i in range(len(lengths))] for side in (0, 1)]
    queries, keys = ends[0][-1], ends[1][-1]
    rest = draws.choice((0, 0, 2))
    options = {"sparse_mode": mode, "scale": draws.choice((1.0, 0.35))}
    if rest:
        ends = [[*side, 0] for side in ends]
    options |= {"actual_seq_qlen": ends[0], "actual_seq_kvlen": ends[1]}
    if mode in (4, 7, 8):
        options |= {"pre_tokens": draws.choice((UNLIMITED, 20, 2)), "next_tokens": draws.integer(-1, 2)}
    if mode == 6:
        options["prefix"] = [draws.integer(max(0, sk - sq), sk) for sq, sk in lengths] + [0] * bool(rest)
    if draws.maybe():
        options["sink"] = draws.tensor(groups * share, dtype=dtype, plain=True)
    sizes = (groups * share, queries + rest), (groups, keys + rest), (groups, keys + rest)
    q, k, v = (draws.tensor(length, heads, 4, dtype=dtype) for heads, length in sizes)
    return (q, k, v, groups * share, "TND"), options, ()


def logsum_of(maximum, total):
    logsum = maximum[..., 0].double() + total[..., 0].double().log()
    return torch.where(total[..., 0] > 0, logsum, float("-inf"))


@generates("npu_fusion_attention")
def fusion_attention(draws):
    args, options, frozen = (packed_call if draws.maybe() else call)(draws)

    def results(found):
        return found[0], logsum_of(found[1], found[2])

    dtypes = (args[0].dtype, torch.float64)
    # Statistics are float32.
    tolerance = {**TOLERANCE, torch.float64: 4e-5}
    return Case(args, whole, options, frozen=frozen, dtypes=dtypes, results=results, tolerance=tolerance)


@generates("npu_fusion_attention_grad")
def fusion_attention_grad(draws):
    args, options, frozen = (packed_call if draws.maybe() else call)(draws)
    q, k, v, heads, layout = args
    wide = [t.double() for t in (q, k, v)]
    numbers = {name: value.double() if name in ("pse", "sink") else value for name, value in options.items()}
    context, logsum = whole(*wide, heads, layout, **numbers)
    dy = draws.like(context.to(q.dtype))
    empty = logsum.isinf()
    statistics = {
        "softmax_max": torch.where(empty, torch.finfo(torch.float32).min, logsum - 0.5),
        "softmax_sum": torch.where(empty, 0.0, torch.full_like(logsum, 0.5).exp()),
    }
    given = {name: t.float().unsqueeze(-1).expand(*t.shape, 8) for name, t in statistics.items()}
    given |= {"attention_in": context.to(q.dtype), **options}
    given["scale_value"] = given.pop("scale")

    def formula(q, k, v, dy, heads, layout, **facts):
        leaves = {"q": q, "k": k, "v": v}
        leaves |= {name: numbers[name] for name in ("pse", "sink") if name in numbers and name not in frozen}
        leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}
        with torch.enable_grad():
            again = {**numbers, **{name: leaves[name] for name in leaves if name in numbers}}
            context, _ = whole(leaves["q"], leaves["k"], leaves["v"], heads, layout, **again)
            if not context.requires_grad:
                return tuple(torch.zeros_like(leaf) for leaf in leaves.values())
            found = torch.autograd.grad(context, list(leaves.values()), dy, allow_unused=True)
        return tuple(torch.zeros_like(a) if b is None else b for a, b in zip(leaves.values(), found))

    def results(found):
        assert (found[3] is None) == ("pse" not in numbers or "pse" in frozen), "gradient of pse"
        assert (found[4] is None) == ("sink" not in numbers), "gradient of sink"
        return tuple(part for part in found if part is not None)

    optional = [options[name].dtype for name in ("pse", "sink") if name in options and name not in frozen]
    dtypes = (q.dtype, q.dtype, q.dtype, *optional)
    tolerance = {**TOLERANCE, torch.float64: 4e-5}
    arguments = (q, k, v, dy, heads, layout)
    # NPUs compute the gradient of a bias only where it is asked for.
    requiring = tuple(name for name in ("pse",) if name in given and name not in frozen)
    facts = {"results": results, "dtypes": dtypes, "tolerance": tolerance, "requiring": requiring}
    return Case(arguments, formula, given, gradients=False, **facts)


@generates("triangle_attention")
def triangle_attention(draws):
    dtype, length, batch = draws.dtype(), draws.size(0), draws.integer(1, 3)
    groups, share = draws.choice(((1, 1), (2, 1), (1, 3), (2, 2)))
    width, narrow = draws.choice((4, 8, 5)), draws.choice((4, 3))
    if draws.checkable:
        batch, width, narrow = 1, 2, 1
    sizes = (groups * share, width), (groups, width), (groups, narrow)
    q, k, v = (draws.tensor(length, batch, *size, dtype=dtype) for size in sizes)
    options = {"block_size": draws.choice((512, 1, 3, 7, 16))}
    if draws.maybe():
        options["scale"] = draws.choice((0.3, 1.0))
    if draws.maybe() and not draws.checkable:
        options["dropout"] = 1.0

    def formula(q, k, v, scale=None, block_size=0, dropout=0.0):
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        row = torch.arange(length)
        visible = (row <= row[:, None])[None, None]
        context, _ = attend(q, k, v, visible, width**-0.5 if scale is None else scale)
        return (context.permute(2, 0, 1, 3) * (1.0 - dropout),)

    return Case((q, k, v), formula, options, tolerance=TOLERANCE)


@generates("npu_lightning_indexer")
def indexer(draws):
    batch, rows, keys, dtype = draws.size(), draws.size(), draws.size(), draws.dtype()
    heads = draws.choice((2, 1, 3) if draws.checkable else (8, 1, 3, 64))
    width = 3 if draws.checkable else draws.choice((128, 8))
    query = draws.tensor(batch, rows, heads, width, dtype=dtype)
    key = draws.tensor(batch, keys, 1, width, dtype=dtype)
    weights = draws.tensor(batch, rows, heads, dtype=dtype)
    options = {"sparse_count": draws.choice((4, 1, 40)), "sparse_mode": draws.choice((3, 0))}

    def formula(query, key, weights, places, sparse_count, sparse_mode):
        products = torch.einsum("bsnd,btd->bsnt", query, key[:, :, 0])
        scores = (torch.where(products > 0, products, 0.0) * weights.unsqueeze(-1)).sum(2)
        seen = torch.ones(rows, keys, dtype=torch.bool)
        if sparse_mode == 3:
            seen = torch.arange(keys) <= torch.arange(rows).unsqueeze(1) + keys - rows
        check_choice(scores.detach(), seen, places.squeeze(2).long(), sparse_count)
        chosen = places.squeeze(2).long()
        values = torch.gather(scores, 2, chosen.clamp(min=0))
        values = torch.where(chosen < 0, torch.zeros_like(values), values)
        return places, values.unsqueeze(2)

    def results(found):
        # Small differences of infinite numbers are none.
        return (found[0], found[1].masked_fill(found[1].isneginf(), 0.0))

    return Case(
        (query, key, weights), formula, options, dtypes=(torch.int32, dtype), knows=(0,), results=results
    )


def check_choice(scores, seen, places, count):
    """Judge which keys were chosen: the highest of those that are seen, each once, the highest first."""
    slack = 1e-4 * max(1.0, scores.abs().max().item())
    for row in range(scores.shape[1]):
        visible = seen[row].nonzero().flatten().tolist()
        for batch in range(scores.shape[0]):
            chosen = places[batch, row].tolist()
            found = [place for place in chosen if place >= 0]
            assert len(set(found)) == len(found) == min(count, len(visible))
            assert chosen == found + [-1] * (count - len(found))
            assert set(found) <= set(visible)
            of_found = scores[batch, row, found]
            assert bool((of_found[:-1] >= of_found[1:] - slack).all())
            rest = [place for place in visible if place not in set(found)]
            if rest and found:
                assert of_found.min() >= scores[batch, row, rest].max() - slack


@generates("npu_sparse_lightning_indexer_grad_kl_loss")
def indexer_loss(draws):
    batch, rows, dtype = draws.size(), draws.choice((2, 1, 5)), draws.dtype()
    keys, count = rows + draws.choice((0, 1, 4)), draws.choice((3, 1, 40))
    heads, index_heads, width = draws.choice((2, 1)), draws.choice((2, 1, 3)), draws.choice((4, 3))
    rope = draws.choice((None, 2))
    places = torch.full((batch, rows, count), -1, dtype=torch.int32)
    for b in range(batch):
        for row in range(rows):
            chosen = draws.order(keys - rows + row + 1)[:count]
            places[b, row, : len(chosen)] = chosen.to(torch.int32)
    given = {
        "query": draws.tensor(rows, batch, heads, width, dtype=dtype),
        "key": draws.tensor(keys, batch, width, dtype=dtype),
        "query_index": draws.tensor(rows, batch, index_heads, width, dtype=dtype),
        "key_index": draws.tensor(keys, batch, 1, width, dtype=dtype),
        "weights": draws.tensor(rows, batch, index_heads, dtype=dtype) / 4,
        "topk_indices": places,
    }
    if rope is not None:
        given["query_rope"] = draws.tensor(rows, batch, heads, rope, dtype=dtype)
        given["key_rope"] = draws.tensor(keys, batch, 1, rope, dtype=dtype)

    def logits(b, row, query, key, query_rope=None, key_rope=None, **others):
        kept = places[b, row][places[b, row] >= 0].long()
        found = 0.5 * query[row, b] @ key[kept, b].T
        return found if query_rope is None else found + 0.5 * query_rope[row, b] @ key_rope[kept, b, 0].T

    wide = {name: one.double() if one.is_floating_point() else one for name, one in given.items()}
    highest, total = torch.empty(2, batch, 1, rows, heads, dtype=torch.float64)
    for b in range(batch):
        for row in range(rows):
            found = logits(b, row, **wide)
            highest[b, 0, row] = found.amax(1)
            total[b, 0, row] = torch.exp(found - found.amax(1, keepdim=True)).sum(1)
    kind = torch.promote_types(dtype, torch.float32)
    given |= {"softmax_max": highest.to(kind), "softmax_sum": total.to(kind), "scale_value": 0.5}

    def formula(query_index, key_index, weights, **others):
        loss = torch.zeros((), dtype=torch.float64)
        for b in range(batch):
            for row in range(rows):
                kept = places[b, row][places[b, row] >= 0].long()
                p = torch.softmax(logits(b, row, **others).detach(), 1).mean(0)
                products = query_index[row, b] @ key_index[kept, b, 0].T
                scores = weights[row, b] @ torch.where(products > 0, products, 0.0)
                loss = loss + (p * (p.log() - torch.log_softmax(scores, 0))).sum()
        return (loss / (rows * batch),)

    attended = ("query", "key", "query_rope", "key_rope", "softmax_max", "softmax_sum")
    return Case((), formula, given, frozen=attended, dtypes=(kind,))
