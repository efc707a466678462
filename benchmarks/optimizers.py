"""Measure the update rules of mindspeed-optim: launches, bytes of state, and what Muon sends.

``python benchmarks/optimizers.py [launches] [state] [moved]`` runs the parts named, or all of them; with
``--write`` they are kept in ``results/optimizers.json``. Launches and bytes are counted and hold on every
machine; the time of an update is this machine's, both sides of it measured in one run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from machine import update
from optimizer_states import counted_rules, missed_rules, show_rules
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
SHARDED = ("--use-distributed-optimizer",)
MUON = ("--optimizer", "muon", "--muon-fp32-matmul-prec", "high")


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


def state() -> dict[str, Any]:
    """Count bytes of state for each parameter, at sizes that nothing divides, on two ranks."""
    found = counted_rules()
    show_rules(found)
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


def missed(results: dict[str, Any]) -> list[str]:
    """Return the goals that these results miss, one line each."""
    found = missed_rules(results.get("state", {}))
    timed = results.get("launches")
    if timed is not None and timed["launches"] != 1:
        found.append(f"{timed['launches']} launches for a group")
    if timed is not None and timed["ratio"] > AT_MOST:
        found.append(f"one launch takes {timed['ratio']:.2f} of torch's loop, {AT_MOST} allowed")
    for ranks, row in results.get("moved", {}).items():
        if row["sent"] != row["planned"]:
            found.append(f"{ranks} ranks: {row['sent']} bytes sent, {row['planned']} planned")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts named, and say which goals they miss."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--write", action="store_true", help="keep the results")
    options = parser.parse_args(argv)
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; choose of {', '.join(PARTS)}")
    results = {name: PARTS[name]() for name in options.parts or PARTS}
    lines = missed(results)
    for line in lines:
        print(f"MISSED: {line}")
    if options.write:
        print(f"written to {update('optimizers', results).name}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
