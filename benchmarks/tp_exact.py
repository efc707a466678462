"""Measures of tensor parallelism that are the same on every machine: calls, bytes, time on a virtual clock.

Functions run on every rank of a world. Bytes and calls of a layer are those of a step of two layers less
those of one layer. On the clock a product takes as long as its operations, and its communication as long as
the product.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

ONE_CALL = ("--global-batch-size", "1", "--micro-batch-size", "1")
MODEL = (
    *("--adam-eps", "1e-3", "--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear"),
    *("--position-embedding-type", "rope"),
)
TP2 = ("--tensor-model-parallel-size", "2")
SP = ("--sequence-parallel",)
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
LEVEL = "--optimize-recomp-communication-level"
AGAIN = "--no-recompute-comm-save-gathered"
RECOMPUTED: dict[str, tuple[str, ...]] = {
    "none": (),
    "plain": FULL,
    "level 1": (*FULL, LEVEL, "1"),
    "level 2": (*FULL, LEVEL, "2"),
    "level 1 again": (*FULL, LEVEL, "1", AGAIN),
    "level 2 again": (*FULL, LEVEL, "2", AGAIN),
}
LAYER = ("--ffn-hidden-size", "128", "--seq-length", "16")
TENSOR = ("TENSOR_MODEL_PARALLEL_GROUP", "tp2d.x", "tp2d.y", "tp.together")


@dataclass
class Counted:
    """The last step of a training.

    Attributes:
        calls: how many of each operation, in groups of tensor parallelism.
        received: bytes of this rank's results that other ranks sent, by group.
        order: operations, groups and bytes in order.
        grad_norm: of the last step.
        loss: of the last step.
        arguments: numbers and words of the run's arguments.
    """

    calls: Counter[str] = field(default_factory=Counter)
    received: dict[str, float] = field(default_factory=dict)
    order: list[tuple[str, str, int]] = field(default_factory=list)
    grad_norm: float = 0.0
    loss: float = 0.0
    arguments: dict[str, Any] = field(default_factory=dict)


def counted(flags: tuple[str, ...], *, steps: int = 1) -> Counted:
    """Train some steps, and count what the last one communicates."""
    from mindspeed_core.activation import activate
    from mindspeed_megatron.instruments.communication import count_communication
    from mindspeed_testing.model_flags import training_flags
    from mindspeed_train import loop

    found = Counted()
    with activate(training_flags(flags, steps), host="standalone") as session:
        run = loop.setup(session)
        for step in range(steps):
            with count_communication() as log:
                result = session.call("train_step", run=run)
            if step == steps - 1:
                for call in log.calls:
                    if call.group in TENSOR:
                        found.calls[call.operation] += 1
                        found.received[call.group] = found.received.get(call.group, 0) + call.sent_bytes
                        found.order.append((call.operation, call.group, call.tensor_bytes))
        found.grad_norm, found.loss = result.grad_norm, result.losses["lm loss"]
        plain = (int, float, str)
        found.arguments = {name: value for name, value in vars(run.args).items() if isinstance(value, plain)}
        loop.teardown(session)
    return found


def by_formula(feature: str, two: Counted) -> float:
    """Return the bytes that a feature of mindspeed-tp states for a layer of a run."""
    from mindspeed_core.registry import Registry
    from mindspeed_megatron.formulas import ELEMENT_SIZE, evaluate, formula_of

    text = formula_of(Registry.discover().features[feature].cls, "bytes_sent", "cpu")
    return evaluate(text, {**two.arguments, ELEMENT_SIZE: 4})


def received_by_layer(one: Counted, two: Counted) -> float:
    """Return the bytes of a layer: a step of two layers less that of one, without gradients of its norms."""
    found = sum(two.received.values()) - sum(one.received.values())
    arguments = two.arguments
    # Summed once a step over the ranks that share the sequence.
    ranks = arguments["tensor_model_parallel_size"]
    norms = 2 * arguments["hidden_size"] * 4 * 2 * (ranks - 1) / ranks
    return found - (norms if arguments["sequence_parallel"] else 0)


def of_layers(flags: tuple[str, ...]) -> tuple[Counter[str], Counted, Counted]:
    """Return the calls of one layer, and the steps of one and of two layers."""
    one = counted((*MODEL, *ONE_CALL, *flags, "--num-layers", "1"))
    two = counted((*MODEL, *ONE_CALL, *flags, "--num-layers", "2"))
    return two.calls - one.calls, one, two


def recomputed(kinds: tuple[str, ...] = tuple(RECOMPUTED)) -> dict[tuple[str, str], Any]:
    """Return calls of a layer, bytes, loss and norm of a step, without and with sequence parallelism."""
    found = {}
    for layout, flags in {"sums": TP2, "rows": (*TP2, *SP)}.items():
        for kind in kinds:
            calls, one, two = of_layers((*flags, *RECOMPUTED[kind]))
            feature = "recompute-comm" if "level" in kind else "tp-linear"
            stated = by_formula(feature, two) if kind != "plain" else None
            found[layout, kind] = (
                *(dict(calls), sum(two.received.values()), two.loss, two.grad_norm),
                *(received_by_layer(one, two), stated),
            )
    return found


def grid_layer(x: int, y: int) -> tuple[float, float, float]:
    """Return a layer's bytes on a grid: received, by the closed form, and by the feature's formula."""
    from mindspeed_tp.volume import LayerShape, input_gathers, linears, norms

    grid = ("--tensor-model-parallel-size", str(x * y), "--tp-2d", "--tp-x", str(x), "--tp-y", str(y))
    _, one, two = of_layers((*grid, *LAYER))
    found = sum(two.received.get(name, 0) - one.received.get(name, 0) for name in ("tp2d.x", "tp2d.y"))
    shape = LayerShape(tokens=16, hidden=64, feed_forward=128, gated=True, query=64, key_value=64)
    # Backward mirrors forward, and gathers the inputs of linears once more.
    elements = 2 * linears(shape, x, y) + input_gathers(shape, x, y) + 2 * norms(shape, x, y)
    # Summed over x are two norms' weights.
    return found - 2 * (x - 1) / x * 2 * 64 / y * 4, 4 * elements, by_formula("tp-2d", two)


def uneven_layer() -> dict[int, tuple[dict[str, int], float, float]]:
    """Return calls, bytes and stated bytes of a layer whose 16, and whose 15, positions two ranks share."""
    found = {}
    for positions in (16, 15):
        calls, one, two = of_layers((*TP2, *SP, "--unaligned-linear", "--seq-length", str(positions)))
        stated = by_formula("unaligned-linear", two)
        found[positions] = dict(calls), received_by_layer(one, two), stated
    return found


def _duration(each: float, _: Any) -> float:
    return each


@dataclass(frozen=True)
class Clocked:
    """A product with its communication, on the clock.

    Attributes:
        longer: operations of the product, which its communication takes as well.
        total: operations until the result is there.
        hidden: collectives in flight during a part's product.
        bits: the weight's gradient.
    """

    longer: float
    total: float
    hidden: int
    bits: Any

    @property
    def ratio(self) -> float:
        """Return the time in units of the longer of product and communication."""
        return self.total / self.longer


def clocked_products(parts: tuple[int, ...] = (1, 2, 4, 8)) -> dict[tuple[str, int], Clocked]:
    """Return each product of tensor parallelism in each number of parts; needs two ranks."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    import mindspeed_core
    from mindspeed_megatron.instruments.communication import count_communication
    from mindspeed_megatron.instruments.virtual_clock import on_a_clock
    from mindspeed_tp.linears import PlannedColumn, PlannedRow
    from mindspeed_tp.plan import Execution, LinearPlan

    s, b, h, f = 64, 1, 32, 64
    found = {}
    with mindspeed_core.activate(list(TP2), platform="cpu"):
        dist.init_process_group("gloo")
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        model_parallel_cuda_manual_seed(3)
        for kind, sp in (("gathered", True), ("scattered", True), ("summed", False)):
            for number in parts:
                execution = Execution("parts", number)
                named: dict[str, Any] = {
                    "config": ModelParallelConfig(
                        tensor_model_parallel_size=2, sequence_parallel=sp, use_cpu_initialization=True
                    ),
                    "init_method": torch.nn.init.normal_,
                    "bias": False,
                    "skip_bias_add": True,
                    "plan": LinearPlan(gather=execution, reduce=execution, adjoint=execution),
                }
                torch.manual_seed(1)
                column = kind == "gathered"
                if column:
                    linear = PlannedColumn(h, f, gather_output=False, **named)
                else:
                    linear = PlannedRow(f, h, input_is_parallel=True, **named)
                shape = (s // 2, b, h) if column else (s, b, f // 2)
                x = torch.randn(shape, generator=torch.Generator().manual_seed(dist.get_rank()))
                x.requires_grad_()
                with count_communication(computation=True) as log:
                    output, _ = linear(x)
                    dist.all_reduce(torch.zeros(1))
                *calls, last = log.calls
                computed = last.launched.flops
                each = computed / len(calls)
                waits = on_a_clock(calls, partial(_duration, each))
                hidden = sum(call.meanwhile is not None and call.meanwhile.flops > 0 for call in calls)
                output.sum().backward()
                total = computed + sum(one.waited for one in waits)
                found[kind, number] = Clocked(computed, total, hidden, linear.weight.grad)
        parallel_state.destroy_model_parallel()
    return found


def head_peaks(chunks: tuple[int, ...] = (1, 2, 4, 8)) -> tuple[int, dict[int, int]]:
    """Return the bytes of a sequence's logits, and the peak of output layer and loss by number of parts."""
    import torch
    import torch.distributed as dist

    from mindspeed_megatron.instruments.memory import TensorBytes
    from mindspeed_tp.chunked_loss import ChunkedLoss, LossPlan

    s, b, h, v = 256, 2, 16, 2048
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    made = torch.Generator().manual_seed(3)
    labels = torch.randint(0, v, (b, s), generator=made)
    hidden = torch.randn(s, b, h, generator=made).requires_grad_()
    weight = torch.randn(v, h, generator=made).requires_grad_()
    peaks = {}
    for number in chunks:
        hidden.grad = weight.grad = None
        with TensorBytes() as tracked:
            ChunkedLoss.apply(hidden, weight, labels, LossPlan(number, dist.group.WORLD)).sum().backward()
        peaks[number] = tracked.peak
    return 4 * s * b * v, peaks


def report_calls(*flags: str) -> dict[str, Any]:
    """Return the collectives of a step whose losses nobody has read yet."""
    from mindspeed_core.activation import activate
    from mindspeed_megatron.instruments.communication import count_communication
    from mindspeed_testing.model_flags import training_flags
    from mindspeed_train import loop

    with activate(training_flags(flags, 2), host="standalone") as session:
        run = loop.setup(session)
        steps = []
        for _ in range(2):
            with count_communication() as log:
                result = session.call("train_step", run=run)
                reports = log.select(group="log")
                steps.append(
                    {
                        "calls": len(log.calls),
                        "blocking": sum(not call.asynchronous for call in log.calls),
                        "reports": len(reports),
                        "waited": sum(call.waited is not None for call in reports),
                        "blocking reports": sum(not call.asynchronous for call in reports),
                    }
                )
                steps[-1]["loss"] = result.losses["lm loss"]
        loop.teardown(session)
    return steps[-1]


def gathers(size: int) -> tuple[int, int]:
    """Return how many gathers a distributed optimizer's state takes in slices, and what the formula says."""
    from mindspeed_core.activation import activate
    from mindspeed_megatron.instruments.communication import count_communication
    from mindspeed_testing.model_flags import training_flags
    from mindspeed_tp.gathered_state import slices
    from mindspeed_train import loop

    flags = ("--use-distributed-optimizer", "--disable-gloo-group", "--hccl-slice-size", str(size))
    with activate(training_flags(flags, 1), host="standalone") as session:
        run = loop.setup(session)
        session.call("train_step", run=run)
        (part,) = getattr(run.optimizer, "chained_optimizers", [run.optimizer])
        with count_communication() as log:
            part.get_parameter_state_dp_zero()
        buckets = [bucket.grad_data.numel() // 2 for buffer in part.buffers for bucket in buffer.buckets]
        loop.teardown(session)
    return len(log.select("gather")), sum(3 * slices(local, size) for local in buckets)
