"""Sorting of tokens by expert and the way back, and the union of two blocks of attention."""

import torch

from differential.case import Case, generates


@generates("npu_moe_token_permute")
def permute(draws):
    dtype, tokens, width = draws.dtype(), draws.size(0), draws.size()
    kind = draws.choice((torch.int64, torch.int32))
    x = draws.tensor(tokens, width, dtype=dtype)
    if tokens and draws.maybe():
        experts, capacity = draws.integer(1, 4), draws.size(0)
        indices = draws.integers(0, tokens - 1, experts, capacity, dtype=kind)

        def padded(x, indices, kept=None, padded_mode=False):
            return x[indices.reshape(-1).long()], indices

        return Case((x, indices), padded, {"padded_mode": True}, dtypes=(dtype, kind))
    copies = draws.integer(1, 4)
    shape = (tokens,) if copies == 1 and draws.maybe() else (tokens, copies)
    indices = draws.integers(0, draws.integer(0, 5), *shape, dtype=kind)
    count = tokens * copies
    kept = draws.choice((None, 0, *((draws.integer(1, count), -draws.integer(1, count)) if count else ())))

    def formula(x, indices, num_out_tokens=None):
        order = sorted(range(count), key=lambda place: (int(indices.reshape(-1)[place]), place))
        where = torch.empty(count, dtype=torch.int32)
        for row, place in enumerate(order):
            where[place] = row
        number = num_out_tokens or count
        number = number if number > 0 else count + number
        rows = torch.tensor([place // copies for place in order[:number]], dtype=torch.int64)
        return x[rows], where

    return Case(
        (x, indices, kept) if kept is not None else (x, indices), formula, dtypes=(dtype, torch.int32)
    )


@generates("npu_moe_token_unpermute")
def unpermute(draws):
    dtype, tokens, width, copies = draws.dtype(), draws.size(0), draws.size(), draws.integer(1, 4)
    weights = draws.choice((dtype, *draws.dtypes))
    if tokens and draws.maybe():
        shape = draws.integer(1, 4), draws.size(0)
        indices = draws.integers(0, tokens - 1, *shape, dtype=draws.choice((torch.int32, torch.int64)))
        x = draws.tensor(indices.numel(), width, dtype=dtype)

        def padded(x, indices, probs, padded_mode, restore_shape):
            result = []
            flat, share = indices.reshape(-1), probs.reshape(-1, 1)
            for token in range(restore_shape[0]):
                result.append((x * share)[flat == token].sum(0))
            return (torch.stack(result),)

        probs = draws.tensor(*shape, dtype=weights)
        return Case((x, indices, probs, True, (tokens, width)), padded, dtypes=(dtype,))
    probs = None
    if copies > 1 or draws.choice((True, False)):
        probs = draws.tensor(tokens, copies, dtype=weights)
    where = draws.order(tokens * copies).to(draws.choice((torch.int32, torch.int64)))
    rows = tokens * copies
    if draws.maybe():
        rows = draws.integer(0, rows)
    x = draws.tensor(rows, width, dtype=dtype)

    def formula(x, where, probs=None):
        whole = torch.cat((x, x.new_zeros(where.numel() - x.shape[0], x.shape[1])))
        rows = whole[where.long()]
        if probs is None:
            return (rows,)
        return ((rows.reshape(*probs.shape, x.shape[1]) * probs.unsqueeze(-1)).sum(1),)

    args = (x, where) if probs is None else (x, where, probs)
    return Case(args, formula, dtypes=(dtype,))


@generates("npu_ring_attention_update")
def ring_update(draws):
    dtype = draws.dtype()
    heads, width = draws.integer(1, 4), draws.choice((8, 3, 64))
    layout = draws.choice(("SBH", "TND"))
    if layout == "SBH":
        length, samples = draws.size(0), draws.integer(1, 3)
        shape, stats = (length, samples, heads * width), (samples, heads, length)
    else:
        length = draws.size(0)
        shape, stats = (length, heads, width), (length, heads)
    blocks = []
    for _ in range(2):
        total = draws.tensor(*stats, dtype=torch.float32, positive=True, plain=True)
        highest = draws.tensor(*stats, dtype=torch.float32, plain=True) * draws.choice((1.0, 20.0))
        seen = draws.integers(0, 5, *stats) > draws.choice((-1, 0))
        total = torch.where(seen, total, torch.zeros_like(total))
        highest = torch.where(seen, highest, torch.full_like(highest, torch.finfo(torch.float32).min))
        output = draws.tensor(*shape, dtype=dtype)
        if layout == "SBH":
            by_row = seen.permute(2, 0, 1).unsqueeze(-1).expand(*shape[:2], heads, width).reshape(shape)
        else:
            by_row = seen.unsqueeze(-1)
        # Rows without keys are zeros, as attention gives them.
        output = torch.where(by_row, output, torch.zeros_like(output))
        spread = [number.unsqueeze(-1).expand(*stats, 8) for number in (highest, total)]
        blocks += [output, *(s.contiguous() if draws.choice((True, False)) else s for s in spread)]
    options = {}
    if layout == "TND":
        options = {"layout": "TND", "actual_seq_qlen": torch.tensor([0, length])}

    def formula(out1, max1, sum1, out2, max2, sum2, layout="SBH", actual_seq_qlen=None):
        highest = torch.maximum(max1, max2)
        shares = [total * torch.exp(most - highest) for most, total in ((max1, sum1), (max2, sum2))]
        whole = shares[0] + shares[1]
        seen = whole > 0
        result = 0.0
        for output, share in ((out1, shares[0]), (out2, shares[1])):
            part = (share / torch.where(seen, whole, torch.ones_like(whole)))[..., :1]
            if layout == "SBH":
                part = part.permute(2, 0, 1, 3).expand(-1, -1, -1, width).reshape(output.shape)
            result = result + output * part
        logsum = torch.where(seen, highest + whole.clamp_min(1e-300).log(), float("-inf"))
        return result, logsum

    def results(found):
        output, highest, total = found
        logsum = highest.double() + total.double().log()
        return output, torch.where(total > 0, logsum, float("-inf"))

    return Case(
        tuple(blocks),
        formula,
        options,
        gradients=False,
        results=results,
        dtypes=(dtype, torch.float64),
        tolerance={torch.float64: 4e-5},
    )


def routed(draws):
    """A map of as many experts for each token, tokens, and that number."""
    dtype, tokens, width, experts = draws.dtype(), draws.size(0), draws.size(), draws.integer(1, 5)
    copies = draws.integer(1, experts)
    chosen = torch.zeros(tokens, experts, dtype=torch.bool)
    for token in range(tokens):
        chosen[token, draws.order(experts)[:copies]] = True
    given = chosen if draws.choice((True, False)) else chosen.to(torch.int8)
    return draws.tensor(tokens, width, dtype=dtype), chosen, given, copies


def places(chosen):
    """Token and expert of each row, sorted by expert."""
    return [(t, e) for e in range(chosen.shape[1]) for t in range(chosen.shape[0]) if chosen[t, e]]


def rows_by_capacity(chosen, capacity):
    """Token and expert of each row where every expert has as many: its own tokens, then others in order."""
    found = []
    for e in range(chosen.shape[1]):
        column = chosen[:, e].tolist()
        ranked = [t for t, own in enumerate(column) if own] + [t for t, own in enumerate(column) if not own]
        found += [(t, e) for t in ranked[:capacity]]
    return found


def picked(table, rows):
    if not rows:
        return table.new_zeros(0)
    tokens, experts = zip(*rows)
    return table[list(tokens), list(experts)]


def rows_of(chosen, draws):
    """The rows, and the options that ask for them."""
    if draws.maybe() and chosen.shape[0]:
        capacity = draws.integer(1, chosen.shape[0])
        options = {"num_out_tokens": capacity * chosen.shape[1], "drop_and_pad": True}
        return rows_by_capacity(chosen, capacity), options
    return places(chosen), {"num_out_tokens": int(chosen.sum())}


def where_of(chosen, rows, padded):
    """The indices of a permutation: the token of each row, or the row of each copy, by token and expert."""
    if padded:
        return torch.tensor([token for token, _ in rows], dtype=torch.int32)
    order = {pair: row for row, pair in enumerate(rows)}
    return torch.tensor([order[t, e] for t, e in sorted(rows)], dtype=torch.int32)


@generates("npu_moe_token_permute_with_routing_map")
def permute_by_map(draws):
    x, chosen, given, _ = routed(draws)
    rows, options = rows_of(chosen, draws)
    dtypes = (x.dtype, torch.int32)
    if draws.choice((True, False)):
        weights = draws.choice((x.dtype, torch.promote_types(x.dtype, torch.float32)))
        options["probs"] = draws.tensor(*chosen.shape, dtype=weights)
        dtypes = (x.dtype, weights, torch.int32)

    def formula(x, routing_map, probs=None, drop_and_pad=False, **others):
        tokens = torch.tensor([token for token, _ in rows], dtype=torch.int64)
        weights = () if probs is None else (picked(probs, rows),)
        return (x[tokens], *weights, where_of(chosen, rows, drop_and_pad))

    def results(found):
        return tuple(part for part in found if part is not None)

    return Case((x, given), formula, options, dtypes=dtypes, results=results)


@generates("npu_moe_token_unpermute_with_routing_map")
def unpermute_by_map(draws):
    x, chosen, given, _ = routed(draws)
    rows, options = rows_of(chosen, draws)
    padded = options.pop("drop_and_pad", False)
    options = {"drop_and_pad": True} if padded else {}
    permuted = draws.tensor(len(rows), x.shape[1], dtype=x.dtype)
    if draws.choice((True, False)):
        options |= {"probs": draws.tensor(*chosen.shape, dtype=x.dtype), "routing_map": given}

    def formula(permuted, where, restore_shape, probs=None, **others):
        tokens = torch.tensor([token for token, _ in rows], dtype=torch.int64)
        weighted = permuted if probs is None else permuted * picked(probs, rows).unsqueeze(1)
        return (permuted.new_zeros(restore_shape).index_add(0, tokens, weighted),)

    where = where_of(chosen, rows, padded)
    args = permuted, where, (chosen.shape[0], x.shape[1])
    return Case(args, formula, options, dtypes=(x.dtype,))
