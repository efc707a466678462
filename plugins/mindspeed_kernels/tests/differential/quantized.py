"""Grouped products of 8-bit rows or weights."""

import struct

import torch

from differential.case import Case, generates
from differential.formulas import NUMBERED, grouped, owners
from differential.products import counts_of, groups_of

OUTPUT = {torch.float32: torch.float16, torch.bfloat16: torch.bfloat16, torch.int64: torch.int8}


def group_list(draws, ends, counts):
    if counts is None:
        return torch.tensor(ends)
    return counts_of(ends) if counts else draws.choice((ends, torch.tensor(ends)))


def packed(scale):
    """float32 as integers of 64 bits, its bits in the low half."""
    bits = [struct.unpack("<I", struct.pack("<f", number))[0] for number in scale.flatten().tolist()]
    return torch.tensor(bits, dtype=torch.int64).reshape(scale.shape)


def eight_bit(draws, *shape):
    made = draws.integers(-128, 127, *shape, dtype=torch.int8)
    if len(shape) > 1 and draws.maybe():
        return made.transpose(-1, -2).contiguous().transpose(-1, -2)
    return made


def quant(counts):
    def generator(draws):
        (rows, ends), k, n = groups_of(draws), draws.size(), draws.size()
        kind = draws.choice(tuple(OUTPUT))
        x, weight = eight_bit(draws, rows, k), eight_bit(draws, len(ends), k, n)
        scale = draws.tensor(len(ends), n, dtype=torch.float32, positive=True, plain=True) / (64 * k)
        options = {}
        if kind != torch.int64:
            scale = scale.to(kind)
            if draws.choice((True, False)):
                options["per_token_scale"] = draws.tensor(rows, dtype=torch.float32)
            options["act_type"] = draws.choice(tuple(NUMBERED))
        elif draws.choice((True, False)):
            options["bias"] = draws.integers(-999, 999, len(ends), n, dtype=torch.int32)
        if draws.maybe():
            options["output_dtype"] = OUTPUT[kind]

        def formula(x, weight, scale, *others, per_token_scale=None, bias=None, act_type=0, **rest):
            exact = grouped(x.double(), weight.double(), ends)
            if bias is not None:
                exact = exact + bias.double()[owners(ends)]
            result = exact * numbers[owners(ends)]
            if per_token_scale is not None:
                result = result * per_token_scale.reshape(-1, 1)
            result = NUMBERED[act_type](result)
            return (result.round().clamp(-128, 127) if kind == torch.int64 else result,)

        numbers = scale.double()
        if kind == torch.int64:
            scale = packed(scale)
        given = group_list(draws, ends, counts)
        args = (x, weight, scale)
        if counts is None:
            args = (*args, given)
        else:
            options["group_list"] = given
        return Case(args, formula, options, gradients=False, dtypes=(OUTPUT[kind],))

    return generator


def weight_quant(counts):
    def generator(draws):
        (rows, ends), k, n, dtype = groups_of(draws), draws.size(), draws.size(), draws.dtype()
        weight = eight_bit(draws, len(ends), k, n)
        x, scale = draws.tensor(rows, k, dtype=dtype), draws.tensor(len(ends), n, dtype=dtype) / 64
        offset = draws.tensor(len(ends), n, dtype=dtype)
        options = {"act_type": draws.choice(tuple(NUMBERED))}
        if draws.maybe():
            options["bias"] = draws.tensor(len(ends), n, dtype=dtype)
        given = group_list(draws, ends, counts)
        args = (x, weight, scale)
        if counts is None:
            args = (*args, offset, given)
        else:
            options |= {"antiquant_offset": offset, "group_list": given}

        def formula(x, weight, scale, *others, antiquant_offset=None, bias=None, act_type=0, **rest):
            shift = others[0] if others else antiquant_offset
            wide = (weight.double() + shift.unsqueeze(1)) * scale.unsqueeze(1)
            result = grouped(x, wide, ends)
            return (NUMBERED[act_type](result if bias is None else result + bias[owners(ends)]),)

        return Case(args, formula, options, gradients=False)

    return generator


generates("quant_grouped_matmul")(quant(None))
generates("npu_quant_gmm")(quant(counts=False))
generates("npu_quant_gmm_v2")(quant(counts=True))
generates("weight_quant_grouped_matmul")(weight_quant(None))
generates("npu_weight_quant_gmm")(weight_quant(counts=False))
generates("npu_weight_quant_gmm_v2")(weight_quant(counts=True))


MOST_EXPONENT, LARGEST = 8, 448.0
"""Of float8 E4M3."""


def mx_rounded(x, axis):
    """Blocks of 32 numbers along an axis, by torch's float8 at a power of two of their own."""
    blocks = []
    for block in x.split(32, axis):
        highest = block.abs().amax(axis, keepdim=True)
        scale = 2.0 ** (highest.where(highest > 0, 1.0).log2().floor() - MOST_EXPONENT)
        scaled = (block / scale).clamp(-LARGEST, LARGEST).float()
        blocks.append(scaled.to(torch.float8_e4m3fn).double() * scale)
    return torch.cat(blocks, axis)


def mx_product(public):
    def generator(draws):
        (rows, ends), k, n = groups_of(draws), draws.choice((4, 33, 70)), draws.size()
        dtype = draws.choice((torch.float32, torch.bfloat16, torch.float16))
        # Forward rounds to the same format with either.
        kind = draws.choice(("E4M3", "HYBRID"))
        x, weight = draws.tensor(rows, k, dtype=dtype), draws.tensor(len(ends), k, n, dtype=dtype)
        bias = draws.tensor(len(ends), n, dtype=dtype) if public and draws.maybe() else None

        def formula(x, weight, *others):
            product = grouped(mx_rounded(x, 1), mx_rounded(weight, 1), ends)
            return (product if bias is None else product + bias.double()[owners(ends)],)

        if not public:
            return Case((x, weight, torch.tensor(ends), kind), formula, gradients=False)
        counts = counts_of(ends)
        counts = draws.choice((counts, counts.tolist()))
        return Case((x, weight, bias, counts, None, kind, False), formula, gradients=False)

    return generator


generates("mx_grouped_matmul")(mx_product(public=False))
generates("npu_quant_group_gemm")(mx_product(public=True))
