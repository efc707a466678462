"""Default stages for data: datasets, iterators, and the batch of each pipeline stage.

Datasets are megatron-core's. Every rank reads its samples from the memory-mapped files itself, so that no
broadcast over tensor parallelism is needed, and a rank that fails to build them stops all with one message.
"""

from __future__ import annotations

import dataclasses
import logging
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.datasets.megatron_dataset import MegatronDataset

from mindspeed_core.errors import DataError
from mindspeed_core.feature import hookimpl
from mindspeed_core.run import Batch, DataIterators, Datasets, Run, Sampling
from mindspeed_megatron.data_source import check_kept_apart, data_source
from mindspeed_megatron.micro_batches import check_shape, micro_batches
from mindspeed_megatron.random_sampler import RandomSampler
from mindspeed_train.checkpoint.content import LoadedBatch
from mindspeed_train.data.datasets import Sizes, WholeBatches, built_datasets, rank_by_rank
from mindspeed_train.data.index_cache import GPTDataset
from mindspeed_train.data.open_iterators import OpenIterators
from mindspeed_train.data.sources import SPLITS
from mindspeed_train.data.synthetic import no_datasets, shaped_iterators

if TYPE_CHECKING:
    from mindspeed_core.session import Session

logger = logging.getLogger("mindspeed_core")

_BATCH_FIELDS = frozenset(field.name for field in dataclasses.fields(Batch)) - {"extra"}


@dataclasses.dataclass
class _StageFields:
    """The fields that each chunk of a run needs, by virtual pipeline stage; asked for once."""

    by_vp_stage: dict[int | None, frozenset[str]] = dataclasses.field(default_factory=dict)


@hookimpl(trylast=True)
def build_datasets(session: Session, args: Namespace, num_samples: Sizes) -> Datasets:
    """Build megatron-core's GPT datasets: rank 0 first, then the others from its index cache."""
    return datasets_from_files(session, args, num_samples)


def datasets_from_files(
    session: Session,
    args: Namespace,
    num_samples: Sizes,
    kind: type[MegatronDataset] = GPTDataset,
    pairs: Callable[[str], Sequence[str]] = lambda prefix: (prefix,),
    *,
    tokenizer: Any = None,
    collective: bool = True,
) -> Datasets:
    """Build datasets of the files that `--data-path` and its relatives name, blended and split.

    For the stage, and for features that read these files in another way. Collective by default.

    Args:
        session: the open session.
        args: the arguments.
        num_samples: see the stage.
        kind: builds a dataset from files and answers samples.
        pairs: the prefixes of the ``.bin`` / ``.idx`` pairs that a name in a blend stands for, those with
            ids of the vocabulary first.
        tokenizer: of the data; by default the one of this host.
        collective: every rank is here, and hears of a failure of another.
    """
    if session.platform.dry_run:
        return no_datasets(num_samples)

    def build() -> Datasets:
        return built_datasets(session, args, num_samples, kind, pairs, tokenizer)

    return rank_by_rank(build, args) if collective else build()


@hookimpl(trylast=True)
def build_data_iterators(session: Session, run: Run) -> DataIterators:
    """Build one lazy iterator per model chunk: a chunk that needs no data starts no loader."""
    datasets, args = run.datasets, run.args
    session.state(_StageFields).by_vp_stage.clear()
    session.at_close(session.state(OpenIterators).end)
    if datasets is None or (datasets.train is None and not args.skip_train):
        raise DataError("there is no training dataset; build_datasets has to come first")
    if args.full_validation and datasets.batch_sampler is not None:
        raise DataError(
            f"--full-validation: the batch sampler of {data_source(session) or 'the data'} decides how many "
            "micro-batches there are; use --eval-iters"
        )

    if session.platform.dry_run:
        return shaped_iterators(run)
    _check_counted(session, datasets, args)

    def iterators(
        dataset: Any, consumed: int, split: str, endless: bool = False
    ) -> list[Iterator[Any]] | None:
        return None if dataset is None else _iterators(run, datasets, dataset, consumed, split, endless)

    def validation(dataset: Any, split: str) -> list[Iterator[Any]] | None:
        if dataset is not None and args.full_validation:
            dataset = WholeBatches(dataset, args.global_batch_size)
        # A pass over the whole set ends where it began; a validation alone begins at the start as well.
        begin = 0 if args.full_validation or args.skip_train else run.consumed_valid_samples
        return iterators(dataset, begin, split, endless=True)

    train = None if args.skip_train else iterators(datasets.train, run.consumed_train_samples, SPLITS[0])
    sets = {name: validation(dataset, f"{SPLITS[1]} {name}") for name, dataset in datasets.valid_sets.items()}
    return DataIterators(
        train,
        validation(datasets.valid, SPLITS[1]),
        iterators(datasets.test, 0, SPLITS[2], endless=True),
        {name: found for name, found in sets.items() if found is not None},
    )


def _check_counted(session: Session, datasets: Datasets, args: Namespace) -> None:
    """Refuse to go on in micro-batches that were counted in another unit."""
    saved = session.state(LoadedBatch).micro_batch_size
    if datasets.batch_sampler is not None and saved not in (None, args.micro_batch_size):
        raise DataError(
            f"--micro-batch-size {args.micro_batch_size}: the batch sampler of "
            f"{data_source(session) or 'the data'} goes on behind the micro-batches that were used, and the "
            f"checkpoint counts {saved} samples for each; use --micro-batch-size {saved}"
        )


@hookimpl(trylast=True)
def get_batch(session: Session, run: Run, data_iterator: Iterator[Any], vp_stage: int | None) -> Batch:
    """Take the next sample and move the fields that this stage needs to the device."""
    known = session.state(_StageFields).by_vp_stage
    fields = known.get(vp_stage)
    if fields is None:
        fields = known[vp_stage] = _fields(session, run, vp_stage)
    if not fields:
        return Batch()
    sample = next(data_iterator)
    _check_fields(session, sample, fields)
    check_kept_apart(session, run.args, sample)
    _check_shape(run, sample)
    device = run.dist.device
    moved = {name: sample[name] for name in fields}
    if device.type != "cpu":
        moved = {
            name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
            for name, value in moved.items()
        }
    extra = {name: moved.pop(name) for name in sorted(fields - _BATCH_FIELDS)}
    return Batch(**moved, extra=extra)


def _check_fields(session: Session, sample: Any, fields: frozenset[str]) -> None:
    source = data_source(session) or "the dataset"
    if not isinstance(sample, Mapping):
        raise DataError(
            f"{source}: a micro-batch is a {type(sample).__name__}; let collate return a dictionary"
        )
    missing = sorted(fields.difference(sample))
    if missing:
        hint = ". --create-attention-mask-in-dataloader adds attention_mask" * ("attention_mask" in missing)
        raise DataError(
            f"{source} gives no {', '.join(missing)}, which this pipeline stage needs; it gives "
            f"{', '.join(sorted(sample))}{hint}"
        )


def _check_shape(run: Run, sample: Mapping[str, Any]) -> None:
    """Refuse a micro-batch of another shape where other ranks expect the usual one."""
    args = run.args
    shape = (run.context.samples or args.micro_batch_size, args.seq_length)
    if args.context_parallel_size > 1:
        check_shape(sample, shape, "ranks of a sequence split this length; use --context-parallel-size 1")
    elif args.pipeline_model_parallel_size > 1 and not args.variable_seq_lengths:
        check_shape(sample, shape, "add --variable-seq-lengths")


def _fields(session: Session, run: Run, vp_stage: int | None) -> frozenset[str]:
    chunk: Any = run.model[vp_stage or 0]
    while not hasattr(chunk, "pre_process"):
        chunk = chunk.module
    fields: frozenset[str] = session.call(
        "batch_fields", args=run.args, pre_process=chunk.pre_process, post_process=chunk.post_process
    )
    return fields


def _iterators(
    run: Run, datasets: Datasets, dataset: Any, consumed: int, split: str, endless: bool
) -> list[Iterator[Any]]:
    sampling = Sampling(
        dataset=dataset,
        split=split,
        consumed_samples=consumed,
        micro_batch_size=run.args.micro_batch_size,
        dp_rank=run.pg.dp.rank(),
        dp_size=run.pg.dp.size(),
        endless=endless,
        seed=run.args.seed,
    )
    cyclic = run.args.dataloader_type == "cyclic" and datasets.batch_sampler is None
    whole = split.startswith(SPLITS[1]) and run.args.full_validation
    made = [
        micro_batches(
            datasets,
            sampling,
            num_workers=run.args.num_workers,
            pin_memory=run.dist.device.type not in ("cpu", "meta"),
            owner=data_source(run.session),
            order=RandomSampler(sampling, sharded=run.args.data_sharding) if cyclic and not whole else None,
        )
        for _ in run.model
    ]
    for iterator in made:
        run.session.state(OpenIterators).add(iterator)
    return [*made]
