"""Formulas that several operators share, in float64 and written for themselves."""

import math

import torch


def sigmoid(x):
    return 1.0 / (1.0 + torch.exp(-x))


def gelu(x):
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def tanh_gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {
    "relu": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "gelu": gelu,
    "fastgelu": lambda x: x * sigmoid(1.702 * x),
    "silu": lambda x: x * sigmoid(x),
}
NUMBERED = {
    0: lambda x: x,
    1: ACTIVATIONS["relu"],
    2: tanh_gelu,
    4: ACTIVATIONS["fastgelu"],
    5: ACTIVATIONS["silu"],
}


def parts_of(total, ends):
    """First and last row of each group."""
    starts = [0, *ends[:-1]] if len(ends) else []
    return list(zip(starts, ends))


def owners(ends):
    """The group of each row."""
    return torch.tensor(
        [e for e, (start, end) in enumerate(parts_of(0, ends)) for _ in range(end - start)]
    ).long()


def grouped(x, weight, ends):
    """Each row times the weight of its group."""
    return torch.einsum("mk,mkn->mn", x, weight[owners(ends)])


def root_norm(x, gamma, epsilon):
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + epsilon) * gamma


def masked_softmax(scores, visible):
    """Weights of the visible scores; rows without any are zero."""
    hidden = torch.where(visible, scores, torch.full_like(scores, -math.inf))
    highest = hidden.detach().amax(-1, keepdim=True) if scores.shape[-1] else hidden.detach()
    highest = torch.where(highest.isfinite(), highest, torch.zeros_like(highest))
    shares = torch.where(visible, torch.exp(scores - highest), torch.zeros_like(scores))
    total = shares.sum(-1, keepdim=True)
    return shares / torch.where(total > 0, total, torch.ones_like(total))
