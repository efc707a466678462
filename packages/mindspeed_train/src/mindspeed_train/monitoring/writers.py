"""TensorBoard and Weights & Biases: small writers that get the same numbers as ``metrics.jsonl``.

Both packages are optional and imported only when their flag is given. Names of scalars are Megatron-LM's, so
that runs of both appear in the same charts; what Megatron-LM does not have keeps its name of
``metrics.jsonl``.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from math import exp, isfinite
from typing import Any, Protocol

from mindspeed_core.errors import ArgumentError
from mindspeed_megatron.spared_failures import SparedFailures
from mindspeed_train.monitoring.timing import slowest

_NAMES = {
    "loss": "lm loss",
    "learning_rate": "learning-rate",
    "grad_norm": "grad-norm",
    "params_norm": "params-norm",
    "num_zeros": "num-zeros",
    "tokens_per_second": "tokens-per-second",
    "tflops_per_device": "throughput",
    "validation_loss": "lm loss validation",
    "test_loss": "lm loss test",
}
_LEFT_OUT = ("step", "memory_source", "step_ms", "peak_memory_bytes", "skipped")
# Perplexity beyond this exponent overflows what charts can show; Megatron-LM stops there too.
_LARGEST_EXPONENT = 20.0


class Writer(Protocol):
    """A destination of a run's scalars."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of a step by name."""

    def close(self) -> None:
        """Write what is still in memory."""


class TensorBoardWriter:
    """Event files in a folder."""

    def __init__(self, folder: str, queue_size: int) -> None:
        """Open an event file in a folder (made if it is missing); keep ``queue_size`` events in memory."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(log_dir=folder, max_queue=queue_size)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write one event per value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbWriter:
    """A run of Weights & Biases."""

    def __init__(self, args: Namespace) -> None:
        """Start the run that the ``--wandb`` flags describe, with all arguments as its configuration."""
        wandb: Any = import_module("wandb")
        self._run: Any = wandb.init(
            project=args.wandb_project,
            name=args.wandb_exp_name,
            dir=args.wandb_save_dir,
            entity=args.wandb_entity,
            config={name: _plain(value) for name, value in vars(args).items()},
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write one record."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class Writers:
    """All writers of a run; on ranks that write nothing, none."""

    def __init__(
        self,
        args: Namespace,
        writers: list[Writer],
        world_size: int = 1,
        failures: SparedFailures | None = None,
    ) -> None:
        """Send to these writers what the flags in ``args`` ask for; one that fails gets nothing more."""
        self.args, self.writers, self.world_size = args, writers, world_size
        self._failures = failures or SparedFailures()

    def record(self, numbers: Mapping[str, Any]) -> None:
        """Send a record of ``metrics.jsonl``."""
        if not self.writers or numbers["step"] % self.args.tensorboard_log_interval:
            return
        values = scalars_of(numbers, self.args)
        if self.args.log_world_size_to_tensorboard and "loss" in numbers:
            values["world-size"] = float(self.world_size)
        for writer in list(self.writers):
            try:
                writer.scalars(numbers["step"], values)
            except Exception as error:
                # Other people's programs fail in their own ways, such as a service that was lost.
                self._failures.tell(type(writer).__name__, error)
                self.writers.remove(writer)

    def close(self) -> None:
        """Close every writer."""
        for writer in self.writers:
            try:
                writer.close()
            except Exception as error:
                self._failures.tell(type(writer).__name__, error)
        self.writers = []


def open_writers(
    args: Namespace, *, active: bool, world_size: int = 1, failures: SparedFailures | None = None
) -> Writers:
    """Open the writers that the flags ask for, on the rank that is ``active``."""
    writers: list[Writer] = []
    if active and args.tensorboard_dir:
        writers.append(TensorBoardWriter(args.tensorboard_dir, args.tensorboard_queue_size))
    if active and args.wandb_project:
        writers.append(WandbWriter(args))
    return Writers(args, writers, world_size, failures)


def check_writers(args: Namespace) -> None:
    """Refuse flags whose package is not installed, before anything starts."""
    for flag, value, package in (
        ("--tensorboard-dir", args.tensorboard_dir, "tensorboard"),
        ("--wandb-project", args.wandb_project, "wandb"),
    ):
        if value and find_spec(package) is None:
            raise ArgumentError(
                flag, value, f"{package} is not installed", f"pip install {package}, or drop the flag"
            )
    if args.wandb_project and not args.wandb_exp_name:
        raise ArgumentError(
            "--wandb-project", args.wandb_project, "the run has no name", "add --wandb-exp-name"
        )


def scalars_of(numbers: Mapping[str, Any], args: Namespace) -> dict[str, float]:
    """Return the scalars of a record of ``metrics.jsonl`` under the names of the charts."""
    values: dict[str, float] = {}
    for name, value in numbers.items():
        if name in _LEFT_OUT or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        values[_NAMES.get(name, name)] = float(value)
    if "step_ms" in numbers:
        values["iteration-time"] = numbers["step_ms"] / 1e3
    if args.log_memory_to_tensorboard and "peak_memory_bytes" in numbers:
        values["mem-peak-bytes"] = float(numbers["peak_memory_bytes"])
    if args.log_timers_to_tensorboard:
        for name, value in numbers.get("timing_ms", {}).items():
            values[f"{name}-time"] = slowest(value) / 1e3
    if args.log_validation_ppl_to_tensorboard:
        for key, split in (("validation_loss", "validation"), ("test_loss", "test")):
            if key in numbers and isfinite(numbers[key]):
                values[f"lm loss {split} ppl"] = exp(min(_LARGEST_EXPONENT, numbers[key]))
    return values


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, list, tuple, type(None))) else str(value)
