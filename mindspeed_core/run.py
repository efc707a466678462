"""The records that pass between stages: the run itself, batches, losses, results.

Plain data classes; the host fills them, features read them and return changed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_core.runtime.metrics import Metrics

if TYPE_CHECKING:
    from argparse import Namespace

    import torch
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule

    from mindspeed_core.session import Session


@dataclass(frozen=True)
class DistInfo:
    """This process in the world."""

    rank: int
    world_size: int
    local_rank: int
    backend: str
    device: torch.device


@dataclass(frozen=True)
class RngInfo:
    """The seeds that were used on this rank."""

    seed: int
    model_parallel_seed: int


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one tensor that crosses a pipeline boundary."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class BoundarySchema:
    """The tensors that cross from one pipeline stage to the next for one micro-batch, in order."""

    tensors: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Batch:
    """One micro-batch as a pipeline stage sees it.

    Attributes:
        tokens: ``[b, s]`` int64, or None on stages without embedding.
        labels: ``[b, s]`` int64, or None on stages without loss.
        loss_mask: ``[b, s]`` float32, or None on stages without loss.
        attention_mask: ``[b or 1, 1, s, s]`` bool (True is masked), or None where attention makes its own.
        position_ids: ``[b, s]`` int64, or None on stages without embedding.
        packed_seq_params: megatron-core's description of packed documents, or None.
        extra: what features add for themselves, by name.
    """

    tokens: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    loss_mask: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    packed_seq_params: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def with_(self, **changes: Any) -> Batch:
        """Return a copy with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Loss:
    """The loss of one micro-batch on this rank.

    Attributes:
        total: scalar, the sum of the per-token losses that count; backward starts here.
        num_tokens: scalar integer tensor, how many tokens count.
        report: what is logged, by name: ``[sum, count]`` (reduced as a mean) per entry.
        averaged: ``total`` is a mean over this rank's tokens already, and ``num_tokens`` is 1: the loss of
            a script whose loss function returns two values.
    """

    total: torch.Tensor
    num_tokens: torch.Tensor
    report: Mapping[str, torch.Tensor]
    averaged: bool = False


@dataclass(frozen=True)
class OptimizerStep:
    """The outcome of an update.

    Attributes:
        successful: False when the update was skipped (overflow).
        grad_norm: global norm before clipping, None where it was not computed.
        num_zeros: zeros in the gradient, None where they were not counted.
    """

    successful: bool
    grad_norm: float | None
    num_zeros: int | None


@dataclass(frozen=True)
class StepResult:
    """One finished training step.

    Attributes:
        losses: reported losses by name, reduced over data parallelism; the same on every rank.
        skipped: the update was skipped.
        grad_norm: see `OptimizerStep`.
        num_zeros: see `OptimizerStep`.
        seconds: wall time.
        tokens: tokens of the whole step over all ranks.
    """

    losses: Mapping[str, float]
    skipped: bool
    grad_norm: float | None
    num_zeros: int | None
    seconds: float = 0.0
    tokens: int = 0


@dataclass(frozen=True)
class LoadInfo:
    """The checkpoint that was loaded: ``path`` is None when the run starts from nothing."""

    path: Path | None
    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0


@dataclass(frozen=True)
class SaveInfo:
    """A checkpoint that was saved."""

    path: Path
    iteration: int


@dataclass(frozen=True)
class Sampling:
    """The place from which a dataset is read, and this rank's share of it.

    Attributes:
        dataset: the dataset.
        split: ``"train"``, ``"validation"``, ``"test"``, or ``"validation NAME"`` for one of several.
        consumed_samples: samples that all ranks together have used before. A micro-batch counts for
            ``micro_batch_size`` samples, whatever it holds.
        micro_batch_size: ``--micro-batch-size``.
        dp_rank: this rank within data parallelism.
        dp_size: number of data-parallel ranks.
        endless: begin again when the dataset is used up (validation and test); otherwise end.
        seed: ``--seed``.
    """

    dataset: Any
    split: str
    consumed_samples: int
    micro_batch_size: int
    dp_rank: int
    dp_size: int
    endless: bool
    seed: int

    @property
    def consumed_microbatches(self) -> int:
        """Return the micro-batches that all ranks together have used before."""
        return self.consumed_samples // self.micro_batch_size

    def share(self, microbatches: Iterable[list[Any]]) -> Iterator[list[Any]]:
        """Yield this rank's micro-batches from where the run stands.

        The ranks take turns, so that a step has the same micro-batches for every number of ranks, and a
        resumed run goes on with the next one.

        Args:
            microbatches: those of the whole run in order, a list of keys of the dataset each; the same on
                every rank.
        """
        return islice(iter(microbatches), self.consumed_microbatches + self.dp_rank, None, self.dp_size)


@dataclass(frozen=True)
class Datasets:
    """Map-style datasets of samples; None for a split without data.

    Attributes:
        train: of training.
        valid: of validation.
        test: of the test.
        valid_sets: with ``--multiple-validation-sets`` the validation datasets by name,
            and ``valid`` is None.
        collate: makes a micro-batch of a list of samples: a dictionary with the fields that pipeline stages
            ask for (`batch_fields`), tensors ``[b, s]`` where they have the names of `Batch`. By default
            samples are dictionaries whose tensors are stacked.
        batch_sampler: yields the keys of one micro-batch of this rank after another, as many as it likes in
            each; with it a dataset needs no length. By default samples are taken in order,
            ``--micro-batch-size`` at a time.
    """

    train: Any
    valid: Any = None
    test: Any = None
    valid_sets: Mapping[str, Any] = field(default_factory=dict)
    collate: Callable[[list[Any]], Mapping[str, Any]] | None = None
    batch_sampler: Callable[[Sampling], Iterable[list[Any]]] | None = None


@dataclass
class DataIterators:
    """Iterators over this rank's micro-batches, one per model chunk; None for a split without data.

    Attributes:
        train: of training; None with ``--skip-train``.
        valid: of validation.
        test: of the test.
        valid_sets: with ``--multiple-validation-sets`` the iterators of each dataset by name.
    """

    train: list[Iterator[Any]] | None
    valid: list[Iterator[Any]] | None = None
    test: list[Iterator[Any]] | None = None
    valid_sets: Mapping[str, list[Iterator[Any]]] = field(default_factory=dict)


@dataclass
class RunContext:
    """The micro-batch and chunk that wrapped code is working on.

    Attributes:
        microbatch: index within the step of the micro-batch in forward, -1 outside.
        vp_stage: virtual pipeline stage of the chunk in forward, None without interleaving.
        training: False during evaluation.
    """

    microbatch: int = -1
    vp_stage: int | None = None
    training: bool = True


@dataclass
class Run:
    """A training run in progress; the only mutable record, owned by the host."""

    session: Session
    args: Namespace
    config: TransformerConfig
    pg: ProcessGroupCollection
    dist: DistInfo
    model: list[MegatronModule]
    optimizer: MegatronOptimizer | None = None
    scheduler: OptimizerParamScheduler | None = None
    datasets: Datasets | None = None
    tokenizer: Any = None
    data: DataIterators | None = None
    schedule: Callable[..., Any] | None = None
    boundary: BoundarySchema | None = None
    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    metrics: Metrics = field(default_factory=Metrics)
    context: RunContext = field(default_factory=RunContext)
    history: list[dict[str, Any]] = field(default_factory=list)
    run_dir: Path | None = None
