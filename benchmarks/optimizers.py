"""Measure the update rules of mindspeed-optim: launches, bytes of state, and what Muon sends.

``python benchmarks/optimizers.py [launches] [state] [moved]`` runs the parts named, or all of them. Launches
and bytes are counted and hold on every machine; the time of an update is this machine's, both sides of it
measured in one run.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.adamw import adamw

from mindspeed_core.feature import hookimpl
from mindspeed_optim.rules.fused_adamw import FusedAdamW
from mindspeed_testing.training import train_side

SHARDS, ELEMENTS = 500, 4096
"""As many pieces of parameters as the distributed optimizer gives a rank of a large model."""
AT_MOST = 0.35
"""Allowed ratio of one launch to torch's loop."""
FLOAT32 = 4
PLAIN = ("--disable-bias-linear", "--normalization", "RMSNorm", "--position-embedding-type", "rope")
ODD = ("--hidden-size", "56", "--ffn-hidden-size", "173", "--num-attention-heads", "4")
"""Sizes that neither blocks nor ranks divide."""
SHARDED = ("--use-distributed-optimizer",)
MUON = ("--optimizer", "muon", "--muon-fp32-matmul-prec", "high")
RULES: Mapping[str, tuple[Sequence[str], float]] = {
    "adam": ((), 8.0),
    "fused_adam": (("--optimizer", "fused_adam"), 8.0),
}
"""Flags of a rule, and the bytes of state that a parameter takes."""


def launches() -> dict[str, Any]:
    """Count launches of the fused rule, and time it beside torch's loop over the same shards."""
    parameters = [torch.nn.Parameter(torch.randn(ELEMENTS)) for _ in range(SHARDS)]
    for parameter in parameters:
        parameter.grad = torch.randn(ELEMENTS)
    group = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    rule = FusedAdamW([{"params": parameters, **group}])
    rule.allocate()
    kernel, count = torch._fused_adamw_, 0

    def counted(*lists: Any, **more: Any) -> None:
        nonlocal count
        count += 1
        kernel(*lists, **more)

    torch._fused_adamw_ = counted  # type: ignore[assignment]
    try:
        rule.step()
    finally:
        torch._fused_adamw_ = kernel  # type: ignore[assignment]
    values = [parameter.detach() for parameter in parameters]
    gradients = [parameter.grad for parameter in parameters]
    firsts, seconds = ([torch.zeros(ELEMENTS) for _ in parameters] for _ in range(2))
    steps = [torch.tensor(1.0) for _ in parameters]

    def loop() -> None:
        adamw(
            values,
            gradients,  # type: ignore[arg-type]
            firsts,
            seconds,
            [],
            steps,
            foreach=False,
            amsgrad=False,
            beta1=0.9,
            beta2=0.95,
            lr=1e-3,
            weight_decay=0.1,
            eps=1e-8,
            maximize=False,
        )

    fused_seconds, loop_seconds = least(rule.step), least(loop)
    ratio = fused_seconds / loop_seconds
    print(f"{SHARDS} shards of {ELEMENTS}: {count} launch for the group")
    print(
        f"  fused {1e3 * fused_seconds:.2f} ms, torch's loop {1e3 * loop_seconds:.2f} ms, "
        f"ratio {ratio:.2f} (at most {AT_MOST})"
    )
    return {"launches": count, "fused": fused_seconds, "loop": loop_seconds, "ratio": ratio}


def least(function: Callable[[], Any], times: int = 20) -> float:
    """Return the least seconds of several calls, after one that warms up."""
    function()
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


class Kept:
    """Records the bytes of state beside the elements of parameters that a rank updates."""

    @hookimpl(wrapper=True)
    def optimizer_step(self, run: Any) -> Any:
        """Count after the update."""
        result = yield
        state = elements = 0
        for part in run.optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    elements += parameter.numel()
                    kept = part.optimizer.state[parameter].values()
                    state += sum(t.nbytes for t in kept if isinstance(t, torch.Tensor) and t.dim())
        run.metrics.add("bytes for each parameter", state / elements)
        return result


def state() -> dict[str, Any]:
    """Count bytes of state for each parameter, at sizes that nothing divides, on two ranks."""
    found = {}
    for name, (flags, formula) in RULES.items():
        side = measured((*PLAIN, *ODD, *SHARDED, *flags), 2, "Kept")
        found[name] = side.metrics["bytes for each parameter"]
        print(f"{name:<12} {found[name]:.4f} bytes for each parameter, formula {formula}")
    return found


class Moved:
    """Records what the ranges of the ranks say that Muon sends in a step."""

    @hookimpl(wrapper=True)
    def optimizer_step(self, run: Any) -> Any:
        """Compute it after the update."""
        result = yield
        moved = 0
        for part in run.optimizer.chained_optimizers:
            rule = part.optimizer
            if rule.exchange is not None:
                moved += FLOAT32 * rule.exchange.sent
        run.metrics.add("planned bytes", float(moved), "sum")
        return result


def moved() -> dict[str, Any]:
    """Compare the bytes that Muon's exchanges send with those that the ranges of the ranks say."""
    found = {}
    for ranks in (1, 2, 4):
        side = measured((*PLAIN, *SHARDED, *MUON), ranks, "Moved")
        sent = [
            sum(total.sent_bytes for (name, _), total in calls.items() if name.startswith("all_to_all"))
            for calls in side.communication
        ]
        planned = side.metrics["planned bytes"]
        found[str(ranks)] = {"sent": sum(sent), "planned": planned}
        print(f"{ranks} ranks: {sum(sent):,} bytes sent, {planned:,.0f} planned")
    return found


def measured(flags: Sequence[str], ranks: int, probe: str) -> Any:
    """Train two steps and measure a third, with a probe of this module."""
    return train_side(
        flags,
        ranks,
        2,
        gradients=False,
        measure=True,
        platform="cpu",
        probes=(f"optimizers:{probe}",),
    )


PARTS = {"launches": launches, "state": state, "moved": moved}


def main(argv: Sequence[str]) -> int:
    """Run the parts named, and print what they found as JSON at last."""
    names = argv or list(PARTS)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        print(f"no such part: {', '.join(unknown)}; choose of {', '.join(PARTS)}", file=sys.stderr)
        return 2
    print(json.dumps({name: PARTS[name]() for name in names}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
