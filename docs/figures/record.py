"""Records what figures show of real runs on a CPU, into ``docs/figures/data``.

``python docs/figures/record.py [NAME …]`` records the named data, or all; that takes some minutes. The
figures are drawn from the files by ``docs/figures/draw.py``, which trains nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DATA = HERE / "data"
ROOT = HERE.parents[1]
POINTS = 240
"""Points of a curve of memory; each is the largest value between it and the one before."""
MODEL = (
    *("--num-layers", "8", "--hidden-size", "128", "--num-attention-heads", "8", "--seq-length", "256"),
    *("--max-position-embeddings", "256", "--ffn-hidden-size", "384", "--group-query-attention"),
    *("--num-query-groups", "4", "--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm"),
    *("--position-embedding-type", "rope", "--micro-batch-size", "1", "--global-batch-size", "1"),
    *("--use-fused-rmsnorm", "--use-fused-swiglu", "--use-flash-attn"),
)
SIDES = {
    "nothing": (),
    "--recompute-activation-function": ("--recompute-activation-function",),
    "--swap-attention": ("--swap-attention", "--swap-min-bytes", "4096"),
    "--recompute-granularity full": (
        *("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
    ),
}


def memory() -> dict[str, Any]:
    """Return the bytes of tensors over one step, with and without features that save some."""
    from mindspeed_testing.worlds import run_world

    return {
        "flags": list(MODEL),
        "sides": {name: run_world(_step, 1, flags)[0] for name, flags in SIDES.items()},
    }


def _step(flags: Sequence[str]) -> dict[str, Any]:
    """Return what is alive during the third step of a training, in bytes beyond what was before it."""
    from mindspeed_core.activation import activate
    from mindspeed_megatron.instruments.memory import TensorBytes
    from mindspeed_testing.model_flags import training_flags
    from mindspeed_train import loop

    class Curve(TensorBytes):
        """Bytes after every operation."""

        def __init__(self) -> None:
            super().__init__()
            self.curve: list[int] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            self.curve.append(self.alive)
            return result

    with activate(training_flags((*MODEL, *flags), 1), platform="cpu", host="standalone") as session:
        run = loop.setup(session)
        for _ in range(2):
            session.call("train_step", run=run)
            run.iteration += 1
        with Curve() as tracked:
            session.call("train_step", run=run)
        loop.teardown(session)
    curve, step = tracked.curve, max(1, len(tracked.curve) // POINTS)
    return {"peak": tracked.peak, "curve": [max(curve[at : at + step]) for at in range(0, len(curve), step)]}


def exchanges() -> dict[str, Any]:
    """Return what four ranks send while they compute attention over one sequence."""
    from mindspeed_testing.worlds import run_world

    return {name: run_world(_attention, 4, name) for name in ("ring", "ulysses")}


def _attention(name: str) -> list[dict[str, Any]]:
    """Return this rank's messages of one forward pass: 64 tokens a rank, 4 heads of 16 channels."""
    import torch
    import torch.distributed as dist

    from mindspeed_cp.functional import ring_attention, ulysses_attention
    from mindspeed_megatron.instruments.communication import count_communication

    dist.init_process_group("gloo")
    tensors = [torch.randn(64, 1, 4, 16) for _ in range(3)]
    attention = {"ring": ring_attention, "ulysses": ulysses_attention}[name]
    with count_communication() as log:
        attention(*tensors, dist.group.WORLD, lengths=(64,) * 4)
    dist.barrier()
    return [
        {"operation": call.operation, "peer": call.peer, "bytes": call.tensor_bytes, "batch": call.batch}
        for call in log.calls
    ]


def overlap() -> dict[str, Any]:
    """Return the first rank's clock of an expert layer, in megatron-core's order and overlapped."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import moe_layer

    from mindspeed_testing.worlds import run_world

    first = run_world(moe_layer.both_orders, 2)[0]
    return {
        name: {
            "computed": side.computed,
            "calls": [
                {
                    "launched": one.call.launched.flops,
                    "launch_event": one.call.launch_event,
                    "waited": one.call.waited.flops,
                    "wait_event": one.call.wait_event,
                    "duration": one.duration,
                    "bytes": one.call.tensor_bytes,
                }
                for one in side.exposed[1.0]
            ],
        }
        for name, side in zip(("megatron-core", "--moe-alltoall-overlap-comm"), first, strict=True)
    }


QUICK_START = (
    *("--num-layers", "4", "--hidden-size", "128", "--num-attention-heads", "4", "--seq-length", "128"),
    *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
    *("--micro-batch-size", "4", "--global-batch-size", "8", "--train-iters", "80", "--lr", "2e-3"),
    *("--eval-iters", "0", "--platform", "cpu"),
)
FUSED = ("--use-fused-rmsnorm", "--use-fused-swiglu", "--use-flash-attn")
EXPERTS = (
    *("--num-experts", "8", "--moe-router-topk", "2", "--moe-token-dispatcher-type", "alltoall"),
    *("--moe-ffn-hidden-size", "128", "--moe-aux-loss-coeff", "0.01", "--moe-load-log", "loads.jsonl"),
)


def losses() -> dict[str, Any]:
    """Return the losses of the quick start: 40 steps on two processes, the others resumed on one."""
    with _dataset() as folder:
        shared = (*QUICK_START, *FUSED, "--save", "checkpoints", "--load", "checkpoints")
        two = ("--nproc", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel")
        _train(folder, *two, *shared, "--exit-interval", "40", "--run-dir", "runs/first")
        _train(folder, *shared, "--run-dir", "runs/second")
        return {name: _logged(folder / "runs" / name) for name in ("first", "second")}


def loads() -> dict[str, Any]:
    """Return the tokens of each expert of one layer over the steps of a training."""
    with _dataset() as folder:
        _train(folder, *QUICK_START, *EXPERTS, "--run-dir", "runs/experts")
        lines = [json.loads(line) for line in (folder / "loads.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "step" in line]
    layer = sorted(steps[0]["loads"], key=int)[0]
    return {"layer": int(layer), "loads": [step["loads"][layer] for step in steps]}


def _dataset() -> Any:
    """Make a dataset of the pages of this project in a folder that goes when it is left."""
    from contextlib import contextmanager

    @contextmanager
    def made() -> Any:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            text = ("prepare-text", str(ROOT / "docs"), "--split-documents", "500")
            _run(folder, *text, "--output-prefix", "docs", "--vocab-size", "1024")
            yield folder

    return made()


def _train(folder: Path, *flags: str) -> None:
    _run(folder, "--data-path", "docs", "--tokenizer-model", "docs.tokenizer.json", *flags)


def _run(folder: Path, *arguments: str) -> None:
    program = Path(sys.executable).with_name("mindspeed-train")
    ran = subprocess.run([str(program), *arguments], cwd=folder, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"mindspeed-train {' '.join(arguments)}: {ran.stderr[-2000:]}")


def _logged(run: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], round(line["loss"], 4)) for line in lines if "loss" in line]


RECORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "memory": memory,
    "exchanges": exchanges,
    "overlap": overlap,
    "losses": losses,
    "loads": loads,
}


def main(names: Sequence[str]) -> int:
    """Record the named data, or all; the exit status."""
    unknown = sorted(set(names) - set(RECORDERS))
    if unknown:
        print(f"no such data: {', '.join(unknown)}; there are {', '.join(RECORDERS)}", file=sys.stderr)
        return 2
    DATA.mkdir(exist_ok=True)
    for name in names or RECORDERS:
        text = json.dumps(RECORDERS[name](), separators=(",", ":"))
        (DATA / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        print(f"{name}: recorded", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
