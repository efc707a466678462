"""Run one layer of experts, and put what it waits for on a clock that only moves with its work.

Two ranks compute a layer forward and backward: the order of work, launches and waits is the program's,
durations are given. A floating-point operation takes one unit; an exchange of rows takes a multiple of the
shared experts' first product, one of probabilities as much less as a number is smaller than a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from mindspeed_megatron.instruments.virtual_clock import Exposed

HIDDEN, WIDTH, SHARED, TOKENS, EXPERTS, TOPK = 64, 32, 64, 128, 8, 2
MODEL = (
    # As many layers as let both weight gradients wait; one of them is computed.
    *("--num-layers", "3", "--hidden-size", str(HIDDEN), "--seq-length", str(TOKENS)),
    *("--max-position-embeddings", str(TOKENS), "--micro-batch-size", "1", "--global-batch-size", "2"),
    *("--num-experts", str(EXPERTS), "--moe-router-topk", str(TOPK), "--moe-ffn-hidden-size", str(WIDTH)),
    *("--moe-shared-expert-intermediate-size", str(SHARED), "--swiglu", "--disable-bias-linear"),
    *("--moe-grouped-gemm", "--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall"),
)
OVERLAP = ("--moe-alltoall-overlap-comm",)
SHARED_PRODUCT = 2 * TOKENS * HIDDEN * 2 * SHARED
"""Operations of the shared experts' first product, gate and value together."""
RATIOS = (0.5, 1.0, 2.0, 4.0)
"""Time of an exchange of rows, in products of shared experts."""
LESS_ROWS = 13
"""Tokens of each rank both of whose experts are on the second one: 230 of 256 rows come to the first."""
TABLE = {0.5: (4.23, 0.0), 1.0: (8.45, 1.08), 2.0: (16.91, 7.41), 4.0: (33.82, 21.55)}
"""Exposed communication of the first rank in millions of operations: megatron-core's order, and ours."""


@dataclass(frozen=True)
class Clocked:
    """The first rank's layer on the clock.

    Attributes:
        computed: operations of the layer.
        exposed: its exchanges, by ratio.
    """

    computed: int
    exposed: dict[float, list[Exposed]]

    def waited(self, ratio: float) -> float:
        """Return the exposed communication in millions of operations."""
        return sum(one.waited for one in self.exposed[ratio]) / 1e6


def fixed_routes(_router: Any, hidden: Any, *_: Any, **__: Any) -> Any:
    """Send each token to an expert of either rank, but `LESS_ROWS` to two of the second one."""
    import torch

    tokens = torch.arange(hidden.shape[0] * hidden.shape[1])
    routing_map = torch.zeros(tokens.numel(), EXPERTS, dtype=torch.bool)
    routing_map[tokens, torch.where(tokens < LESS_ROWS, 5, tokens % 4)] = True
    routing_map[tokens, torch.where(tokens < LESS_ROWS, 6, 4 + tokens % 4)] = True
    scores = _router.gating(hidden).view(-1, EXPERTS).softmax(-1)
    return scores * routing_map, routing_map


def clocked(flags: Sequence[str]) -> Clocked:
    """Compute the layer with flags forward and backward; run in two processes."""
    import torch
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.router import TopKRouter

    from mindspeed_core.activation import activate
    from mindspeed_megatron.instruments.communication import Call, count_communication
    from mindspeed_megatron.instruments.virtual_clock import on_a_clock
    from mindspeed_testing.model_flags import training_flags
    from mindspeed_train import loop

    with (
        patch.object(TopKRouter, "forward", fixed_routes),
        activate(training_flags((*MODEL, *flags), 1), host="standalone") as session,
    ):
        run = loop.setup(session)
        layer = next(module for module in run.model[0].modules() if isinstance(module, MoELayer))
        hidden = torch.randn(TOKENS, 1, HIDDEN, requires_grad=True)
        with count_communication(computation=True) as log:
            layer(hidden)[0].sum().backward()
            end = torch.zeros(1)
            torch.distributed.all_reduce(end)
        loop.teardown(session)
    exchanges = log.select("all_to_all_single")
    largest = max(call.tensor_bytes for call in exchanges)

    def units(ratio: float, call: Call) -> float:
        of_rows = call.tensor_bytes > largest / 8
        return ratio * SHARED_PRODUCT / (1 if of_rows else HIDDEN)

    return Clocked(
        log.calls[-1].launched.flops,
        {ratio: on_a_clock(exchanges, lambda call, r=ratio: units(r, call)) for ratio in RATIOS},
    )


def both_orders() -> tuple[Clocked, Clocked]:
    """Return megatron-core's order and that of overlapped communication; run in two processes."""
    return clocked(()), clocked(OVERLAP)


def table(theirs: Clocked, ours: Clocked) -> list[str]:
    """Return the lines that compare both orders."""
    lines = [f"{'exchange':>10}{'megatron-core exposed/total':>30}{'overlapped exposed/total':>28}"]
    for ratio in RATIOS:
        parts = [
            f"{side.waited(ratio):.2f} / {side.waited(ratio) + side.computed / 1e6:.2f}"
            for side in (theirs, ours)
        ]
        lines.append(f"{ratio:>10}{parts[0]:>30}{parts[1]:>28}")
    return lines
