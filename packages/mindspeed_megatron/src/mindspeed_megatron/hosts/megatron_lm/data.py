"""Datasets, their iterators and the micro-batch: interceptions and defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from megatron.core.models.gpt import GPTModel
from megatron.core.models.mamba import MambaModel

from mindspeed_core.errors import UserError
from mindspeed_core.feature import hookimpl
from mindspeed_core.run import Batch, DataIterators, Datasets, Sampling
from mindspeed_megatron.data_source import check_kept_apart, data_source
from mindspeed_megatron.hosts.megatron_lm import pretrain_call
from mindspeed_megatron.hosts.megatron_lm.batches import SLOT, SPLIT, splits_sequences
from mindspeed_megatron.hosts.megatron_lm.pretrain_call import PretrainCall, intercepts
from mindspeed_megatron.hosts.megatron_lm.script_batch import batch_of
from mindspeed_megatron.micro_batches import check_shape, micro_batches
from mindspeed_megatron.unwrap import unwrap

if TYPE_CHECKING:
    from mindspeed_core.run import Run
    from mindspeed_core.session import Session


@hookimpl(trylast=True)
def build_datasets(num_samples: tuple[int, int | None, int]) -> Datasets:
    """Build the script's datasets."""
    train, valid, test = pretrain_call.current().pending("build_datasets")(list(num_samples))
    return Datasets(train, valid, test)


def for_script(now: PretrainCall, datasets: Datasets) -> tuple[Any, Any, Any]:
    """Return what Megatron-LM's provider returns: datasets, or iterators where features make the batches.

    Iterators are what it calls an external data loader, which it passes on as they are.

    Raises:
        UserError: Megatron-LM has no place for what the features want.
    """
    if datasets.valid_sets:
        raise UserError(
            "a feature brings several validation datasets, and Megatron-LM takes one from a script; let its "
            "Datasets have valid, or train with mindspeed-train"
        )
    parts = (datasets.train, datasets.valid, datasets.test)
    if datasets.collate is None and datasets.batch_sampler is None:
        return parts
    args = now.session.args
    for flag in ("full_validation", "hybrid_context_parallel"):
        if getattr(args, flag, False):
            raise UserError(
                f"--{flag.replace('_', '-')}: a feature makes the batches itself (collate or batch_sampler); "
                "drop the flag, or the feature's"
            )
    args.dataloader_type = "external"
    valid = 0 if args.skip_train else args.consumed_valid_samples
    consumed = (args.consumed_train_samples, valid, 0)
    train, validation, test = (
        None if dataset is None else _micro_batches(now, datasets, dataset, start, split)
        for dataset, start, split in zip(parts, consumed, ("train", "validation", "test"))
    )
    return None if args.skip_train else train, validation, test


def _micro_batches(
    now: PretrainCall, datasets: Datasets, dataset: Any, consumed: int, split: str
) -> Iterator[Any]:
    from megatron.core import parallel_state

    session = now.session
    args = session.args
    size = args.micro_batch_size
    if split != "train":
        # Scripts of core_v0.18 and later validate in micro-batches of a size of their own.
        size = getattr(args, "eval_micro_batch_size", None) or size
    sampling = Sampling(
        dataset=dataset,
        split=split,
        consumed_samples=consumed,
        micro_batch_size=size,
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        endless=split != "train",
        seed=args.seed,
    )
    owner = data_source(session)
    found = micro_batches(
        datasets,
        sampling,
        num_workers=getattr(args, "num_workers", 0),
        pin_memory=session.platform.device_type != "cpu",
        owner=owner,
    )
    variable = getattr(args, "variable_seq_lengths", False)
    if args.tensor_model_parallel_size > 1 and not now.reads_any_length:
        remedy = (
            "Megatron-LM's tensor-parallel ranks get them in this shape; use --tensor-model-parallel-size 1"
        )
    elif args.pipeline_model_parallel_size > 1 and not variable:
        remedy = (
            "pipeline stages expect them in this shape; train with mindspeed-train --variable-seq-lengths"
        )
    else:
        remedy = ""
    return _checked(now.session, found, size, remedy)


def _checked(session: Session, found: Iterator[Any], size: int, remedy: str) -> Iterator[Any]:
    """Yield micro-batches whose documents stay apart; with a remedy they have the usual shape."""
    args = session.args
    for sample in found:
        check_kept_apart(session, args, sample)
        if remedy:
            check_shape(sample, (size, args.seq_length), remedy)
        yield sample


@intercepts(run=True)
def around_build_iterators(now: PretrainCall, original: Callable[..., Any], provider: Any) -> Any:
    """Intercept ``build_train_valid_test_data_iterators``, called for each chunk of the model."""
    with now.calling("build_data_iterators", lambda: original(provider)):
        data: DataIterators = now.session.call("build_data_iterators", run=now.sync_run())
    now.run.data = data
    train, valid, test = (_single(part) for part in (data.train, data.valid, data.test))
    now.test_iterators.append(test)
    return train, valid, test


def _single(iterators: list[Any] | None) -> Any:
    return iterators[0] if iterators else None


@hookimpl(trylast=True)
def build_data_iterators() -> DataIterators:
    """Build Megatron-LM's iterators of one chunk."""
    train, valid, test = pretrain_call.current().pending("build_data_iterators")()
    return DataIterators([train], [valid], [test])


@hookimpl(trylast=True)
def get_batch(run: Run, data_iterator: Iterator[Any]) -> Batch:
    """Get the script's batch: ``[b, s]`` tokens, labels, loss mask and positions.

    Raises:
        UserError: the script trains another kind of model, whose batch has other parts.
    """
    now = pretrain_call.current()
    now.padding_mask = None
    values = now.pending("get_batch")(data_iterator)
    batch = batch_of(values, now.padding_mask)
    if not isinstance(unwrap(run.model[0]), (GPTModel, MambaModel)) or batch is None:
        raise UserError(
            "an active feature works on the parts of a batch, which are known of GPT and Mamba scripts alone"
            "; drop its flag for this script"
        )
    now.described_by_script = batch.packed_seq_params
    if splits_sequences(now):
        _check_whole(run, batch)
    return batch


def _check_whole(run: Run, batch: Batch) -> None:
    """Refuse sequences that the script has split already, by other means than those that were taken over."""
    length = next((part.shape[1] for part in (batch.tokens, batch.labels) if part is not None), None)
    feature = run.session.plan.slots[SLOT]
    if batch.packed_seq_params is not None:
        raise UserError(
            f"{feature}: the script packs samples by itself, and splits them; drop its flag for that"
        )
    if length not in (None, run.args.seq_length):
        raise UserError(
            f"{feature}: the script's get_batch gives sequences of {length} tokens where --seq-length is "
            f"{run.args.seq_length}: it splits them by itself, and not by its {SPLIT}"
        )
