"""Time places of experts against one-hot products, over numbers of tokens, forward and backward.

Places are tables of indices: time per token stays what it is. One-hot products multiply by a tensor
``[T, E, C]``, whose size grows with the square of the number of tokens at a given capacity factor. Both sides
take turns in one process; each time is the smallest of several.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import torch
from machine import machine, write
from torch import Tensor

from mindspeed_moe.capacity_rows import from_places, places_of, to_places
from mindspeed_moe.gshard import capacity_of, kept_choices, masks_of, weights_of

EXPERTS, HIDDEN, CHOICES, FACTOR = 8, 64, 2, 1.0
SIZES = (1024, 2048, 4096, 8192, 16384)
MOST_PRODUCTS = 4096
"""One-hot products of more tokens take gigabytes."""


def operands(tokens: int) -> tuple[Tensor, Tensor]:
    """Return hidden states ``[T, h]`` and logits ``[T, E]``."""
    made = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, HIDDEN, generator=made)
    return hidden.requires_grad_(), torch.randn(tokens, EXPERTS, generator=made).requires_grad_()


def routed(logits: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return weights and map ``[T, E]``, and the capacity."""
    scores = logits.softmax(-1)
    capacity = capacity_of(logits.shape[0], EXPERTS, CHOICES, FACTOR)
    kept = kept_choices(masks_of(scores.topk(CHOICES).indices, EXPERTS), capacity)
    return weights_of(scores, kept, CHOICES), kept, capacity


def by_tables(hidden: Tensor, logits: Tensor) -> Tensor:
    """Send tokens to their places and back by tables."""
    weights, kept, capacity = routed(logits)
    places = places_of(kept, capacity, CHOICES)
    return from_places(to_places(hidden, places), weights.gather(1, places.experts), places)


def by_products(hidden: Tensor, logits: Tensor) -> Tensor:
    """Send tokens to their places and back by one-hot products, as GShard writes it."""
    weights, kept, capacity = routed(logits)
    places = (kept.cumsum(0) - 1).clamp_min(0)
    dispatch = torch.nn.functional.one_hot(places, capacity).to(hidden.dtype) * kept.unsqueeze(-1)
    rows = torch.einsum("tec,th->ech", dispatch, hidden)
    return torch.einsum("tec,ech->th", dispatch * weights.unsqueeze(-1), rows)


def seconds(way: Callable[[Tensor, Tensor], Tensor], tokens: int, repeats: int) -> float:
    """Return the smallest time of forward and backward."""
    found = []
    for _ in range(repeats):
        leaves = operands(tokens)
        start = time.perf_counter()
        way(*leaves).square().sum().backward()
        found.append(time.perf_counter() - start)
    return min(found)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all sizes, print a table, and write the numbers where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the numbers in benchmarks/results")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    ours, theirs = by_tables(*operands(256)), by_products(*operands(256))
    torch.testing.assert_close(ours, theirs)
    print(f"{machine()['processor']}, one thread")
    print(f"{'tokens':>8}{'tables ms':>12}{'us/token':>10}{'products ms':>14}{'products/tables':>17}")
    rows = {}
    for tokens in SIZES:
        tables = seconds(by_tables, tokens, options.repeats)
        row = {"tables_seconds": tables}
        line = f"{tokens:>8}{tables * 1e3:>12.2f}{tables / tokens * 1e6:>10.3f}"
        if tokens <= MOST_PRODUCTS:
            products = seconds(by_products, tokens, min(options.repeats, 3))
            row |= {"products_seconds": products, "ratio": products / tables}
            line += f"{products * 1e3:>14.1f}{products / tables:>17.1f}"
        print(line)
        rows[str(tokens)] = row
    first, last = SIZES[0], SIZES[-1]
    growth = rows[str(last)]["tables_seconds"] / rows[str(first)]["tables_seconds"]
    print(f"{last // first} times the tokens take {growth:.1f} times as long")
    if options.write:
        results = {"sizes": rows, "tokens_ratio": last / first, "time_ratio": growth}
        print(f"written to {write('moe_deepspeed', results).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
