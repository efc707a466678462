"""The records that pass between stages: the run itself, batches, losses, results.

Plain data classes; the host fills them, features read them and return changed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
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
class Datasets:
    """Map-style datasets of samples; None for a split without data.

    Attributes:
        train: of training.
        valid: of validation.
        test: of the test.
        valid_sets: with ``--multiple-validation-sets`` the validation datasets by name,
            and ``valid`` is None.
    """

    train: Any
    valid: Any = None
    test: Any = None
    valid_sets: Mapping[str, Any] = field(default_factory=dict)


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
    """A training run in progress; the only mutable record, owned by the host.

    Attributes:
        loaded: what `load_checkpoint` loaded; nothing in a library session, whose caller loads.
    """

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
    loaded: LoadInfo = LoadInfo(path=None)

    def complete_parameters(self) -> None:
        """Let every parameter of `model` hold its updated value, also those that are gathered late.

        With ``--overlap-param-gather`` an update reaches the parameters of other data-parallel ranks only
        during the next forward pass. Whoever reads parameters between the update and that pass (after the
        ``yield`` in ``optimizer_step`` or ``train_step``, in ``log_step``) calls this first: it gathers what
        is missing, and the next forward pass does not gather it again. Without the overlap it does nothing.

        Collective over the data-parallel ranks, so every rank calls it, or none.

        Complete means for parameters that data parallelism shards: with torch's FSDP2, and with Megatron-FSDP
        and ``optim_grads_params``, each is a ``DTensor`` that holds this rank's updated part (of the float32
        copy that Megatron-FSDP updates); with Megatron-FSDP's other strategies each is whole.

        Raises:
            SessionError: the session knows no model or not its wrapper of data parallelism (a library
                session), or parameters are never complete between steps
                (``--reuse-grad-buf-for-mxfp8-param-ag``).
        """
        from mindspeed_core.megatron.parameter_gather import complete_parameters

        complete_parameters(self.model, self.optimizer)
