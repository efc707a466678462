"""One layer of experts on the device: one product per expert, grouped products, MegaBlocks where installed.

Each side routes as many tokens to as many experts of the same size in bfloat16, forward and backward, one
after another. MegaBlocks draws weights of its own, so that its routes differ; those of the other sides are
equal, and so are their results.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from kernel_cuda_cases import seconds_on_device
from report import Report

SEQUENTIAL = "one product per expert"
GROUPED = "grouped products"
MEGABLOCKS = "MegaBlocks"
SIDES = {
    SEQUENTIAL: (),
    GROUPED: ("--moe-grouped-gemm", "--moe-permute-fusion"),
}
"""Flags of the sides of this repository, the first one being what the others are compared with."""
BOUND = 2e-2
"""Largest distance of results in bfloat16, as part of the largest value."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the layer.

    Attributes:
        tokens: of a batch.
        hidden: width of a token.
        width: of an expert, gate and value each.
        experts: number of experts.
        topk: experts of a token.
        repeats: measurements of each side.
    """

    tokens: int
    hidden: int
    width: int
    experts: int
    topk: int
    repeats: int

    def flags(self) -> tuple[str, ...]:
        """Return the flags of a model with one such layer."""
        return (
            *("--num-layers", "1", "--hidden-size", str(self.hidden), "--num-attention-heads", "16"),
            *("--seq-length", str(self.tokens), "--max-position-embeddings", str(self.tokens)),
            *("--num-experts", str(self.experts), "--moe-router-topk", str(self.topk)),
            *("--moe-ffn-hidden-size", str(self.width), "--moe-token-dispatcher-type", "alltoall"),
            *("--moe-router-load-balancing-type", "none", "--moe-router-dtype", "fp32"),
            *("--swiglu", "--disable-bias-linear", "--bf16", "--global-batch-size", "1"),
        )


ON_CUDA = Sizes(tokens=8192, hidden=2048, width=1408, experts=64, topk=6, repeats=10)
SMOKE = Sizes(tokens=64, hidden=64, width=128, experts=4, topk=2, repeats=1)


def measure(report: Report) -> None:
    """Run every side, compare results and times."""
    sizes = SMOKE if report.smoke else ON_CUDA
    report.facts["sizes"] = vars(sizes)
    hidden = torch.randn(sizes.tokens, 1, sizes.hidden, dtype=torch.bfloat16, device=report.device)
    hidden.requires_grad_()
    seconds: dict[str, float] = {}
    results: dict[str, Any] = {}
    for name, flags in SIDES.items():
        with report.check(f"{name}: forward and backward") as found, ExitStack() as stack:
            step = of_this_repository(stack, sizes, flags, hidden, report.platform)
            hidden.grad = None
            results[name] = step().detach(), hidden.grad.clone()
            found["seconds"] = seconds[name] = median_seconds(step, sizes.repeats, report.device)
    if find_spec("megablocks") is None:
        report.row(MEGABLOCKS, absent="not installed")
    else:
        with report.check(f"{MEGABLOCKS}: forward and backward") as found:
            step = of_megablocks(sizes, hidden)
            found["seconds"] = seconds[MEGABLOCKS] = median_seconds(step, sizes.repeats, report.device)
    if results.keys() == SIDES.keys():
        with report.check(f"{GROUPED} equal {SEQUENTIAL}") as found:
            for what, ours, theirs in zip(("output", "gradient"), results[GROUPED], results[SEQUENTIAL]):
                off = float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())
                found[what] = off
                assert off < BOUND, f"{what}: {off:.3g}"
    for theirs in (SEQUENTIAL, MEGABLOCKS):
        if {GROUPED, theirs} <= seconds.keys():
            report.row(f"{GROUPED}, theirs {theirs}", ours=seconds[GROUPED], theirs=seconds[theirs], unit="s")
    report.headline = ", ".join(f"{name} {1e3 * value:.3g} ms" for name, value in seconds.items())


def of_this_repository(
    stack: ExitStack, sizes: Sizes, flags: tuple[str, ...], hidden: torch.Tensor, platform: str
) -> Callable[[], torch.Tensor]:
    """Build a model with flags, open until ``stack`` is closed; return a step of its layer of experts."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from mindspeed_core.activation import activate
    from mindspeed_testing.model_flags import training_flags
    from mindspeed_train import loop

    command = ["--platform", platform, *training_flags((*sizes.flags(), *flags), 1)]
    session = stack.enter_context(activate(command, host="standalone"))
    run = loop.setup(session)
    stack.callback(loop.teardown, session)
    layer = next(module for module in run.model[0].modules() if isinstance(module, MoELayer))

    def step() -> torch.Tensor:
        output: torch.Tensor = layer(hidden)[0]
        output.sum().backward()
        return output

    return step


def of_megablocks(sizes: Sizes, hidden: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a step of MegaBlocks' dropless layer of the same sizes."""
    from megablocks.layers.arguments import Arguments
    from megablocks.layers.dmoe import dMoE

    arguments = Arguments(
        hidden_size=sizes.hidden,
        ffn_hidden_size=sizes.width,
        bias=False,
        return_bias=False,
        activation_fn=torch.nn.functional.silu,
        moe_num_experts=sizes.experts,
        moe_top_k=sizes.topk,
        moe_loss_weight=0.0,
        mlp_type="glu",
        mlp_impl="grouped" if find_spec("grouped_gemm") else "sparse",
        fp16=False,
        bf16=True,
        device=hidden.device,
    )
    layer = dMoE(arguments).to(hidden.device)

    def step() -> torch.Tensor:
        output = layer(hidden)
        output = output[0] if isinstance(output, tuple) else output
        output.sum().backward()
        return output

    return step


def median_seconds(step: Callable[[], torch.Tensor], repeats: int, device: str) -> float:
    """Return the median time of a step, after three that are not counted."""
    for _ in range(3):
        step()
    return statistics.median(seconds_on_device(step, device=device) for _ in range(repeats))
