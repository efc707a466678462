"""Compare measured plans of recomputation with full recomputation, at equal budgets: part d of `memory.py`.

Part (d1) trains a LLaMA on the CPU: plans of several budgets and full recomputation take turns, step by step,
in one process, and the bytes of each are measured. Part (d2) measures the operators of one layer of LLaMA2-7B
and 13B, a rank's share with tensor parallelism of 8, and simulates steps of the whole model on a device of
64 GiB, beside what MindSpeed published. Times are this machine's: run it while nothing else does.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mindspeed_core.activation import activate
from mindspeed_memory.policy.costs import NOTHING, WHOLE, Costs, Measured, plan_of_stage
from mindspeed_testing.model_flags import training_flags
from mindspeed_train import loop

_MIB, _GIB = 2**20, 2**30
_SWITCH, _SIZE = "--adaptive-recompute-device-swap", "--adaptive-recompute-device-size"
_MEASURING = 8
_LLAMA = (
    *("--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm", "--position-embedding-type", "rope"),
    *("--use-fused-rmsnorm", "--use-fused-swiglu", "--use-flash-attn", "--global-batch-size", "1"),
)
_LAYERS = 12
_CPU = (
    *("--num-layers", str(_LAYERS), "--hidden-size", "256", "--num-attention-heads", "4"),
    *("--ffn-hidden-size", "688", "--seq-length", "512", "--max-position-embeddings", "512", *_LLAMA),
)
_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Budgets, as shares of what lies between full recomputation and keeping everything."""
_SHARDS, _DEVICE, _RESERVE, _TOKENS = 8, 64 * _GIB, 2 * _GIB, 4096
_MODELS: dict[str, dict[str, Any]] = {
    "LLaMA2-7B": {"layers": 32, "hidden": 4096, "width": 11008, "heads": 32, "published": 16.3},
    "LLaMA2-13B": {"layers": 40, "hidden": 5120, "width": 13824, "heads": 40, "published": 12.1},
}
_VOCABULARY = 32000


class Training:
    """A session with a measured plan whose layers can be told their forms between two steps."""

    def __init__(self, session: Any) -> None:
        """Set the run up, and train until the costs are measured."""
        self.run = loop.setup(session)
        self.session = session
        found = [getattr(feature, "_policy", None) for feature in session._features]
        self.policy = next(policy for policy in found if policy is not None)
        session.call("start_run", run=self.run)
        # The first step of the plan is followed.
        for _ in range(_MEASURING + 1):
            session.call("train_step", run=self.run)
        self.measured: Measured = self.policy.measured[0]

    def step(self, forms: Sequence[str]) -> float:
        """Train a step in these forms; return its seconds."""
        for layer, form in zip(self.policy.layers, forms):
            layer.form = form
        start = time.perf_counter()
        self.session.call("train_step", run=self.run)
        return time.perf_counter() - start

    def bytes(self, forms: Sequence[str]) -> int:
        """Train a step in these forms; return the most bytes that it had."""
        for layer, form in zip(self.policy.layers, forms):
            layer.form = form
        with self.policy.profile.step(self.run, None):
            self.session.call("train_step", run=self.run)
        resident, peak, _ = self.policy.profile.needed
        return int(resident + peak)


@contextmanager
def training(*flags: str) -> Iterator[Training]:
    """Open a session whose plan has all the memory it wants."""
    budget = (_SWITCH, _SIZE, str(2**20), "--adaptive-recompute-profiling-step", str(_MEASURING))
    with activate(training_flags((*flags, *budget), 10_000), platform="cpu", host="standalone") as session:
        yield Training(session)
        # What a run writes at its end is none of the measurement.
        loop.teardown(session)


def forms_of(measured: Measured, budget: int) -> tuple[str, ...]:
    """Return the forms of the layers of the plan within a budget, in the order of the layers of one kind."""
    plan = plan_of_stage(measured, budget)
    assert plan is not None
    (forms,) = plan.forms.values()
    return forms


def on_cpu(rounds: int) -> dict[str, Any]:
    """Part (d1): plans and full recomputation, in turns."""
    full = (WHOLE,) * _LAYERS
    with training(*_CPU) as model:
        least, most = model.measured.needed, model.bytes((NOTHING,) * _LAYERS)
        budgets = {share: int(least + share * (most - least)) for share in _SHARES}
        sides = {"full recomputation": full, "nothing": (NOTHING,) * _LAYERS}
        sides |= {f"{share:.0%}": forms_of(model.measured, budget) for share, budget in budgets.items()}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, forms in sides.items():
                seconds[name].append(model.step(forms))
        used = {name: model.bytes(forms) for name, forms in sides.items()}
        costs = next(iter(model.measured.costs.values()))
    ratios = {
        name: [whole / own for whole, own in zip(seconds["full recomputation"], times)]
        for name, times in seconds.items()
    }
    rows: dict[str, Any] = {}
    for name, forms in sides.items():
        budget = next((b for share, b in budgets.items() if name == f"{share:.0%}"), None)
        rows[name] = {
            "budget_bytes": budget,
            "used_bytes": used[name],
            "seconds": statistics.median(seconds[name]),
            "more_tokens_percent": 100 * (statistics.median(ratios[name]) - 1),
            "forms": dict(Counter(forms)),
            "held": budget is None or used[name] <= budget,
        }
    return {"sides": rows, "costs": {"bytes": costs.nbytes, "seconds": costs.seconds}}


def show_on_cpu(found: dict[str, Any]) -> None:
    """Print the table."""
    print(f"{'':<20}{'budget MiB':>11}{'used':>8}{'ms a step':>11}{'tokens/s':>10}  forms")
    for name, row in found["sides"].items():
        budget = row["budget_bytes"]
        shown = "" if budget is None else format(budget / _MIB, ",.1f")
        print(
            f"{name:<20}{shown:>11}{row['used_bytes'] / _MIB:>8,.1f}{row['seconds'] * 1e3:>11.1f}"
            f"{row['more_tokens_percent']:>+9.1f}%  {_counted(row['forms'])}"
            f"{'' if row['held'] else '  OVER ITS BUDGET'}"
        )


def _counted(forms: dict[str, int]) -> str:
    return ", ".join(f"{count} {form}" for form, count in forms.items())


def simulated(name: str, tokens: int) -> dict[str, Any]:
    """Part (d2): one layer measured, a model planned."""
    model = _MODELS[name]
    hidden, width, heads = model["hidden"], model["width"] // _SHARDS, model["heads"] // _SHARDS
    flags = (
        *("--num-layers", "2", "--hidden-size", str(hidden), "--num-attention-heads", str(heads)),
        *("--kv-channels", "128", "--ffn-hidden-size", str(width), *_LLAMA),
        *("--seq-length", str(tokens), "--max-position-embeddings", str(tokens)),
    )
    with training(*flags) as two_layers:
        costs = next(iter(two_layers.measured.costs.values()))
        kept = min(two_layers.step((NOTHING,) * 2) for _ in range(2)) / 2
    parameters = model["layers"] * (hidden * heads * 128 * 4 + 3 * hidden * width)
    parameters += 2 * _VOCABULARY * hidden // _SHARDS
    resident = 18 * parameters
    # In proportion to its products, beside those of a layer.
    head = kept * _VOCABULARY / _SHARDS / (4 * heads * 128 + 3 * width)
    # bfloat16 has half of what was measured in float32; the micro-batch grows until not everything fits.
    batch = 1
    while True:
        scale = batch * _TOKENS / tokens
        nbytes = {form: int(size * scale / 2) for form, size in costs.nbytes.items()}
        loss = int(12 * batch * _TOKENS * _VOCABULARY / _SHARDS)
        full = model["layers"] * nbytes[WHOLE]
        measured = Measured(
            resident=resident,
            peak=full + max(nbytes[NOTHING], loss),
            head=full + loss,
            last="layer",
            under_way={0: 1},
            costs={(0, "layer"): Costs(model["layers"], nbytes, dict(costs.seconds))},
        )
        room = _DEVICE - _RESERVE
        if resident + model["layers"] * nbytes[NOTHING] + loss > room or batch >= 64:
            break
        batch *= 2
    plan = plan_of_stage(measured, room)
    assert plan is not None
    without = model["layers"] * kept + head
    gain = 100 * ((without + plan.seconds_of_full) / (without + plan.seconds) - 1)
    forms = dict(Counter(next(iter(plan.forms.values()))))
    return {
        "micro_batch": batch,
        "resident_bytes": resident,
        "full_recomputation_bytes": measured.needed,
        "planned_bytes": measured.needed + plan.nbytes,
        "layer_seconds": kept,
        "seconds": costs.seconds,
        "bytes": nbytes,
        "forms": forms,
        "more_tokens_percent": gain,
        "at_most_percent": 100 * plan.seconds_of_full / without,
        "published_percent": model["published"],
    }


def show_simulated(found: dict[str, Any]) -> None:
    """Print a line for each model."""
    for name, row in found.items():
        print(
            f"{name}: micro-batch {row['micro_batch']}, {row['full_recomputation_bytes'] / _GIB:.1f} GiB "
            f"with full recomputation, {row['planned_bytes'] / _GIB:.1f} planned; "
            f"{row['more_tokens_percent']:+.1f} % (published {row['published_percent']:+.1f} %, "
            f"{row['at_most_percent']:+.1f} % without recomputation); {_counted(row['forms'])}"
        )


def policies(rounds: int, tokens: int) -> dict[str, Any]:
    """Measure both parts.

    Args:
        rounds: steps of each side on the CPU.
        tokens: sequence in which a layer is measured.
    """
    cpu = on_cpu(rounds)
    return {"cpu": cpu, "models": {name: simulated(name, tokens) for name in _MODELS}}
