"""Operators that work on each row by itself: norms, activations, rotations, softmax."""

import torch

from differential.case import Case, generates
from differential.formulas import masked_softmax, root_norm, sigmoid


def leading(draws, low=1, most=3):
    """Some leading sizes, now and then with a zero."""
    sizes = [draws.integer(1, 4) for _ in range(draws.integer(low, most))]
    if sizes and not draws.checkable and draws.choice((False, False, False, True)):
        sizes[0] = 0
    return sizes


@generates("rms_norm")
def rms_norm(draws):
    dtype = draws.dtype()
    x = draws.tensor(*leading(draws, 0), draws.size(), dtype=dtype)
    gamma = draws.tensor(x.shape[-1], dtype=draws.choice((dtype, *draws.dtypes)))
    options = {"epsilon": draws.choice((1e-6, 1e-2, 1.0))} if draws.maybe() else {}
    if draws.maybe():
        options["zero_centered"] = True

    def formula(x, gamma, epsilon=1e-6, zero_centered=False):
        return (root_norm(x, 1.0 + gamma if zero_centered else gamma, epsilon),)

    return Case((x, gamma), formula, options)


@generates("swiglu")
def swiglu(draws):
    dtype, sizes = draws.dtype(), [*leading(draws, 0), 1]
    dim = draws.choice((-1, *range(-len(sizes), len(sizes))))
    sizes[-1], sizes[dim] = draws.size(), 2 * draws.size(0)
    x = draws.tensor(*sizes, dtype=dtype)

    def formula(x, dim=-1):
        half = x.shape[dim] // 2
        gate, value = x.narrow(dim, 0, half), x.narrow(dim, half, half)
        return (gate * sigmoid(gate) * value,)

    return Case((x, dim) if dim != -1 or draws.maybe() else (x,), formula)


@generates("cross_entropy")
def cross_entropy(draws):
    logits = draws.tensor(*leading(draws), draws.size(), dtype=draws.dtype())
    # Ids outside of the vocabulary have the logit zero.
    target = draws.integers(-1, logits.shape[-1], *logits.shape[:-1])

    def formula(logits, target):
        ids = torch.arange(logits.shape[-1])
        chosen = (target.unsqueeze(-1) == ids).to(logits.dtype)
        largest = logits.amax(-1, keepdim=True)
        total = largest.squeeze(-1) + (logits - largest).exp().sum(-1).log()
        return (total - (logits * chosen).sum(-1),)

    return Case((logits, target), formula, dtypes=(torch.promote_types(logits.dtype, torch.float32),))


@generates("scaled_masked_softmax")
def scaled_masked_softmax(draws):
    dtype = draws.dtype()
    samples, heads = draws.integer(1, 3), draws.integer(1, 3)
    # The kernel of the device takes multiples of 32.
    sq, sk = (draws.choice((draws.size(), 32)) if not draws.checkable else draws.size() for _ in range(2))
    kind = draws.choice(("mask", "none", "triangle"))
    if kind == "triangle":
        sk = sq
    x = draws.tensor(samples, heads, sq, sk, dtype=dtype)
    options = {"scale": draws.choice((1.0, 0.3, 4.0))}
    if kind == "mask":
        shape = draws.choice((1, samples)), draws.choice((1, heads)), sq, sk
        mask = draws.integers(0, draws.choice((1, 4, 9)), *shape) > draws.choice((0, 1))
        options["mask"] = mask if draws.choice((True, False)) else mask.to(torch.uint8)
    elif kind == "triangle":
        options["fixed_triu_mask"] = True

    def formula(x, mask=None, scale=1.0, fixed_triu_mask=False):
        visible = torch.ones_like(x, dtype=torch.bool)
        if mask is not None:
            visible = (mask == 0).expand(x.shape)
        if fixed_triu_mask:
            row, column = torch.arange(x.shape[2])[:, None], torch.arange(x.shape[3])
            visible = (column <= row).expand(x.shape)
        return (masked_softmax(x * scale, visible),)

    return Case((x,), formula, options)


@generates("npu_rotary_position_embedding")
def rotary(draws):
    sizes, width = [draws.integer(1, 4) for _ in range(3)], 2 * draws.size()
    if draws.choice((False, False, False, True)) and not draws.checkable:
        sizes[draws.integer(0, 2)] = 0
    dtype, mode = draws.dtype(), draws.integer(0, 1)
    tables = draws.choice((dtype, *draws.dtypes))
    x = draws.tensor(*sizes, width, dtype=dtype)
    shape = [draws.choice((1, size)) for size in sizes]
    cos, sin = (draws.tensor(*shape, width, dtype=tables) for _ in range(2))
    if draws.maybe():
        sin = draws.tensor(*(draws.choice((1, size)) for size in sizes), width, dtype=tables)

    def formula(x, cos, sin, mode=0):
        half = x.shape[-1] // 2
        columns = torch.arange(x.shape[-1])
        if mode == 0:
            partner, sign = (columns + half) % (2 * half), torch.where(columns < half, -1.0, 1.0)
        else:
            partner, sign = columns ^ 1, torch.where(columns % 2 == 0, -1.0, 1.0)
        return (x * cos + x[..., partner] * sign.double() * sin,)

    return Case((x, cos, sin, mode) if mode or draws.maybe() else (x, cos, sin), formula)


def _dropout_add_norm(norm):
    def generator(draws):
        dtype, weights = draws.dtype(), draws.dtype()
        sizes = [*leading(draws, 2, 2), draws.size()]
        width = sizes[-1]
        residual = draws.choice((None, draws.choice((dtype, *draws.dtypes))))
        drop = 0.0 if draws.checkable else draws.choice((0.0, 0.3, 1.0))
        asked = drop == 0.3 or draws.maybe()
        prenorm, single = draws.choice((False, True)), draws.maybe()
        args = (
            draws.tensor(*sizes, dtype=dtype),
            None if residual is None else draws.tensor(*sizes, dtype=residual),
            draws.tensor(width, dtype=weights),
            draws.choice((None, draws.tensor(width, dtype=weights))),
            drop,
            draws.choice((1e-5, 1e-2)),
        )
        options = {"prenorm": prenorm, "residual_in_fp32": single, "return_dropout_mask": asked}
        if draws.maybe():
            options["rowscale"] = draws.tensor(*sizes[:2], *draws.choice(((), (1,))), dtype=dtype)
        if draws.maybe():
            options["layerscale"] = draws.tensor(width, dtype=draws.choice((dtype, *draws.dtypes)))
        if residual is None:
            residual = torch.promote_types(dtype, torch.float32) if single else dtype
        dtypes = (dtype, *([residual] if prenorm else []), *([torch.bool] if asked else []))

        def formula(
            x0, residual, weight, bias, p, epsilon, *given, rowscale=None, layerscale=None, **asked_for
        ):
            values = x0
            if rowscale is not None:
                values = values * rowscale.reshape(*x0.shape[:2], 1)
            if layerscale is not None:
                values = values * layerscale
            if given:
                values = values * given[0].double() / (1.0 - p if p < 1.0 else 1.0)
            elif p == 1.0:
                values = values * 0.0
            total = values if residual is None else values + residual
            result = norm(total, weight, epsilon)
            result = result if bias is None else result + bias
            return (result, *([total] if asked_for["prenorm"] else []), *given)

        # What was dropped is random; everything else follows from it.
        knows = (1 + prenorm,) if asked else ()
        tolerance = {torch.bfloat16: 0.1, torch.float16: 2e-2}
        return Case(args, formula, options, dtypes=dtypes, knows=knows, tolerance=tolerance)

    return generator


def _centred(total, weight, epsilon):
    centred = total - total.mean(-1, keepdim=True)
    return root_norm(centred, weight, epsilon)


generates("npu_dropout_add_layer_norm")(_dropout_add_norm(_centred))
generates("npu_dropout_add_rms_norm")(_dropout_add_norm(root_norm))
