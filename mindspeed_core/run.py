"""The records that pass between stages: the run itself, batches, losses, results.

Plain data classes; the host fills them, features read them and return changed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_core.batch import Batch as Batch
from mindspeed_core.batch import Loss as Loss
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
    """One tensor that crosses a pipeline boundary.

    Attributes:
        name: of the tensor.
        shape: of one micro-batch.
        dtype: of the tensor.
        requires_grad: its gradient travels back; False for masks and positions.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = True


@dataclass(frozen=True)
class ChunkPlace:
    """The place of one of a rank's model chunks in the whole model.

    Attributes:
        vp_stage: number of the chunk on its rank, None without interleaving.
        global_stage: number of its pipeline stage in the model; 0 comes first.
        pre_process: it holds the embedding.
        post_process: it holds the output layer, and the loss is computed behind it.
    """

    vp_stage: int | None
    global_stage: int
    pre_process: bool
    post_process: bool


@dataclass(frozen=True)
class BoundarySchema:
    """The tensors that cross from one pipeline stage to the next for one micro-batch, in order."""

    tensors: tuple[TensorSpec, ...]


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
        losses: reported losses by name, reduced over data parallelism; the same on every rank. They are read
            from the device when somebody looks at one.
        skipped: the update was skipped.
        grad_norm: see `OptimizerStep`.
        num_zeros: see `OptimizerStep`.
        seconds: wall time.
        tokens: tokens of the whole step over all ranks, those that do not count in the loss included: samples
            times sequence length, less the positions that fill up (`Batch.padding_mask`).
        counts: over how many tokens each reported loss is a mean, by name; empty where that is not known.
    """

    losses: Mapping[str, float]
    skipped: bool
    grad_norm: float | None
    num_zeros: int | None
    seconds: float = 0.0
    tokens: int = 0
    counts: Mapping[str, float] = field(default_factory=dict)

    @property
    def loss_tokens(self) -> int | None:
        """Tokens of the whole step that counted in the loss ``lm loss``; None where that is not known."""
        count = self.counts.get("lm loss")
        return None if count is None else round(count)


@dataclass(frozen=True)
class LoadInfo:
    """The checkpoint that was loaded: ``path`` is its folder, its URL as text, or None for none."""

    path: Path | str | None
    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0


@dataclass(frozen=True)
class SaveInfo:
    """A checkpoint that was saved: ``path`` is its folder, or its URL as text."""

    path: Path | str
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
        samples: of the micro-batch; None where it has ``--micro-batch-size`` of them.
        doing: what a schedule runs, for reports of runs that stand still; empty where it says nothing.
    """

    microbatch: int = -1
    vp_stage: int | None = None
    training: bool = True
    samples: int | None = None
    doing: str = ""


@dataclass
class Run:
    """A training run in progress; the only mutable record, owned by the host.

    Attributes:
        session: the open session.
        args: the validated arguments.
        config: megatron-core's configuration of the model.
        pg: megatron-core's process groups.
        dist: this process in the world.
        model: this rank's model chunks, as the schedule calls them: wrapped for data parallelism.
        optimizer: None in mode ``inference`` and until it is built.
        scheduler: of learning rate and weight decay; None without an optimizer.
        datasets: the data sets of the splits; None until they are built.
        tokenizer: None where the host has none.
        data: the iterators over this rank's micro-batches; None until they are built.
        schedule: megatron-core's forward and backward function, or what a feature puts in its place.
        boundary: the tensors that cross pipeline stages.
        iteration: finished training steps, those of a checkpoint it was resumed from included.
        consumed_train_samples: samples of training over all ranks, likewise.
        consumed_valid_samples: samples of validation over all ranks.
        metrics: numbers recorded in the step under way.
        context: the micro-batch and chunk that wrapped code is working on.
        history: the logged numbers of every step, those of the run that is resumed included, read from their
            file when asked for; empty on ranks that log nothing.
        run_dir: the folder that receives the run's numbers; None where the host writes none.
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
    history: Sequence[Mapping[str, Any]] = ()
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
        from mindspeed_core.discovery.parts import part

        part("complete_parameters")(self.model, self.optimizer)
