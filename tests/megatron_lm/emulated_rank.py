"""One rank of Megatron-LM's own `pretrain_gpt.py` on the processor, recording the numbers of each step.

The checkout's cuda calls are answered by the cpu platform of this package, through a ledger of patches as in
a session. Megatron-LM asks more of a device than megatron-core does (that there is one, and which), so a few
answers are added here.

Usage: `MEGATRON_LM_PATH=... python emulated_rank.py NUMBERS [FLAGS of pretrain_gpt.py]`; the last pipeline
stage's first rank writes one JSON object per step to the file NUMBERS.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from mindspeed_core.feature import Patch
from mindspeed_core.platforms.cpu import CpuPlatform
from mindspeed_core.runtime.patches import PatchLedger

_DEVICE = SimpleNamespace(
    name="processor", major=8, minor=0, total_memory=1 << 34, multi_processor_count=1, warp_size=32
)


def is_available() -> bool:
    """Megatron-LM trains only where it is."""
    return True


def no_accelerator() -> bool:
    """A torch made for CUDA would pin memory for a device."""
    return False


def get_device_properties(device: Any = None) -> SimpleNamespace:
    """What it prints and compares."""
    return _DEVICE


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """That of a device old enough to ask nothing more of the environment."""
    return _DEVICE.major, _DEVICE.minor


def get_device_name(device: Any = None) -> str:
    """A name for its log."""
    return str(_DEVICE.name)


def no_kernels(args: Any) -> None:
    """The CUDA kernels that are compiled at the start belong to options that are not in use."""


def keeps_generator(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that draws from one of two generators, the device's and the processor's; here they are one.

    The warm-up of fused functions draws from the device's, position embeddings are initialised from the
    processor's. Data loaders draw a seed from the processor's, dropout draws from the device's.
    """

    def call(*args: Any, **options: Any) -> Any:
        state = torch.get_rng_state()
        result = original(*args, **options)
        torch.set_rng_state(state)
        return result

    return call


def recorded(
    original: Callable[..., Any], steps: list[dict[str, float]], numbers: Path | None
) -> Callable[..., Any]:
    """Megatron-LM's `train_step`, whose results are written down in full precision."""

    def train_step(*args: Any, **options: Any) -> Any:
        results = original(*args, **options)
        losses, norm = results[0], results[5]
        if losses:
            steps.append({name: float(value) for name, value in losses.items()} | {"grad_norm": float(norm)})
            if numbers is not None and torch.distributed.get_rank() == _first_of_last_stage():
                with numbers.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(steps[-1]) + "\n")
        return results

    return train_step


def _first_of_last_stage() -> int:
    world = torch.distributed.get_world_size()
    from megatron.core import parallel_state

    stages = parallel_state.get_pipeline_model_parallel_world_size()
    return world // stages * (stages - 1)


@contextmanager
def emulated(numbers: Path | None = None) -> Iterator[list[dict[str, float]]]:
    """Answer Megatron-LM's questions about a device, and yield a list that its steps are written to.

    Args:
        numbers: a file that they are written to as well, by the last pipeline stage's first rank.
    """
    steps: list[dict[str, float]] = []
    answers = {
        f"torch.cuda:{function.__name__}": function
        for function in (is_available, get_device_properties, get_device_capability, get_device_name)
    }
    emulation = [patch for patch in CpuPlatform().patches() if patch.target not in answers]
    ledger = PatchLedger()
    ledger.apply(emulation, owner="cpu")
    ledger.apply(
        [
            Patch(target=target, new=f"emulated_rank:{function.__name__}", reason="Megatron-LM asks")
            for target, function in {**answers, "torch.accelerator:is_available": no_accelerator}.items()
        ],
        owner="Megatron-LM",
    )
    stance = torch.compiler.set_stance("force_eager")
    from megatron.training import initialize, training

    changes: list[tuple[Any, str, Any]] = [
        (initialize, "_warmup_jit_function", keeps_generator(initialize._warmup_jit_function)),
        *(
            (training, name, keeps_generator(getattr(training, name)))
            for name in ("build_train_valid_test_data_iterators", "evaluate")
        ),
        (training, "train_step", recorded(training.train_step, steps, numbers)),
    ]
    if find_spec("megatron.legacy") and find_spec("megatron.legacy.fused_kernels"):
        changes.append((import_module("megatron.legacy.fused_kernels"), "load", no_kernels))
    before = [(place, name, getattr(place, name)) for place, name, _ in changes]
    for place, name, new in changes:
        setattr(place, name, new)
    try:
        with stance:
            yield steps
    finally:
        for place, name, old in before:
            setattr(place, name, old)
        ledger.revert()


def main() -> None:
    """Open the emulation and run the script."""
    checkout = Path(os.environ["MEGATRON_LM_PATH"]).resolve()
    numbers = Path(sys.argv[1]).resolve()
    sys.argv = [str(checkout / "pretrain_gpt.py"), *sys.argv[2:]]
    sys.path.insert(0, str(checkout))
    with emulated(numbers):
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
