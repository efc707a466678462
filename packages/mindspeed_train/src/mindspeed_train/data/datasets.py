"""Datasets of a run: built of files, or made up, the same on every rank."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.datasets import blended_dataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset, MockGPTLowLevelDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from torch.utils.data import Dataset

from mindspeed_core.errors import DataError, UserError
from mindspeed_core.run import Datasets
from mindspeed_core.runtime.gather import all_gather_values
from mindspeed_train.arguments.sizes import check_index_fits
from mindspeed_train.data.files import DatasetFiles, check_dataset_files, largest_token
from mindspeed_train.data.identity import TrainingData, check_unchanged, record_of
from mindspeed_train.data.index_cache import BlendedDataset
from mindspeed_train.data.python_helpers import index_builders
from mindspeed_train.data.sources import SPLITS, Blend, Sources, data_sources, parse_split
from mindspeed_train.text.stages import BuiltTokenizer, build_for_session, check_for_datasets
from mindspeed_train.text.tokenizer import NullTokenizer, Tokenizer

if TYPE_CHECKING:
    from mindspeed_core.session import Session


logger = logging.getLogger("mindspeed_core")
Sizes = tuple[int, int | None, int]
_Shares = tuple[float, float, float]


class _MadeUpTokens(MockGPTLowLevelDataset):
    """megatron-core's counting sequences, within the vocabulary: 0.15 counts to 4,096 whatever its size."""

    def __init__(self, tokenizer: NullTokenizer) -> None:
        super().__init__(tokenizer)
        self._vocab_size = tokenizer.vocab_size

    def __getitem__(self, idx: int) -> Any:
        return super().__getitem__(idx) % self._vocab_size


class MadeUpDataset(MockGPTDataset):
    """Samples of ``--mock-data``: a function of their index and the vocabulary size."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: GPTDatasetConfig) -> Any:
        """Return the sequences that samples are cut from."""
        return _MadeUpTokens(config.tokenizer)


class WholeBatches(Dataset[Any]):
    """A dataset filled up to whole batches with samples that count for nothing.

    So every sample is seen once whatever the number of ranks, and the mean loss is that of the whole set.
    """

    def __init__(self, dataset: Any, batch: int) -> None:
        """Fill ``dataset`` up to a multiple of ``batch``."""
        self.dataset = dataset
        self.samples = len(dataset)
        self.length = -(-self.samples // batch) * batch

    def __len__(self) -> int:
        """Return the number of samples, those that fill up included."""
        return self.length

    def __getitem__(self, index: int) -> Any:
        """Return the sample, or the first one without loss."""
        if index < self.samples:
            return self.dataset[index]
        sample = self.dataset[0]
        if not isinstance(sample, Mapping) or "loss_mask" not in sample:
            raise DataError(
                "--full-validation: the last batch is filled up with samples without loss, and a sample of "
                "this dataset has no loss_mask to switch off; use --eval-iters"
            )
        return {**sample, "loss_mask": torch.zeros_like(sample["loss_mask"])}


class _RankLocalBuilder(BlendedMegatronDatasetBuilder):
    """megatron-core's builder without its barriers.

    It waits between rank 0 and the others inside of the construction, where a failure of rank 0 leaves the
    others waiting; here the caller orders the ranks and hears of failures.
    """

    def _build_megatron_datasets_parallel(
        self, prefixes: Sequence[str], split: Any, sizes_per_dataset: Any
    ) -> list[list[Any]]:
        built = [
            self._build_megatron_dataset_splits(prefix, split, sizes, False)
            for prefix, sizes in zip(prefixes, sizes_per_dataset)
        ]
        return [list(datasets) for datasets in zip(*built)]

    @staticmethod
    def build_generic_dataset(
        cls: Callable[..., Any], is_built_on_rank: Any, synchronize_ranks: bool, *args: Any
    ) -> Any:
        return (BlendedDataset if cls is blended_dataset.BlendedDataset else cls)(*args)


def built_datasets(
    session: Session,
    args: Namespace,
    num_samples: Sizes,
    kind: type[MegatronDataset],
    pairs: Callable[[str], Sequence[str]],
    tokenizer: Any,
) -> Datasets:
    """Return the datasets that the flags of data describe, built of files or made up."""
    sources = data_sources(args)
    tokenizer = tokenizer or session.state(BuiltTokenizer).tokenizer
    if tokenizer is None:
        tokenizer = build_for_session(session, args)
    check_for_datasets(session, tokenizer, args)
    values: dict[str, Any] = {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "path_to_cache": args.data_cache_path,
        "mmap_bin_files": args.mmap_bin_files,
        "tokenizer": tokenizer,
        "reset_position_ids": bool(args.reset_position_ids),
        "reset_attention_mask": bool(args.reset_attention_mask),
        "eod_mask_loss": bool(args.eod_mask_loss),
        "create_attention_mask": bool(args.create_attention_mask_in_dataloader),
    }
    if sources.per_split is None:
        shares = parse_split(args.split)
        if sources.shared is not None:
            # A share of zero says that the split is not wanted; training always is.
            num_samples = _without(num_samples, [share == 0 for share in (1.0, *shares[1:])])
            values["blend"] = sources.shared.pair
        values["split"] = args.split
    else:
        shares = (1.0, 1.0, 1.0)
        num_samples = _without(num_samples, [blend is None for blend in sources.per_split])
        # megatron-core never ends counting the epochs of a split from which nothing is wanted.
        values["blend_per_split"] = [
            blend.pair if blend is not None and samples != 0 else None
            for blend, samples in zip(sources.per_split, num_samples)
        ]
        if args.multiple_validation_sets:
            values["multiple_validation_sets"] = True
    if args.full_validation:
        values["full_validation"] = True
    _check_sources(sources, tokenizer, shares, args.split, num_samples, pairs)
    _check_identity(session, sources, args, pairs)
    check_index_fits(args, num_samples)
    config = GPTDatasetConfig(**values)
    if config.split_matrix is not None:
        matrix: list[Any] = [
            share if samples != 0 else None for share, samples in zip(config.split_matrix, num_samples)
        ]
        config.split_matrix = matrix
    dataset_class = MadeUpDataset if sources.made_up else kind
    with index_builders():
        train, valid, test = _RankLocalBuilder(dataset_class, list(num_samples), lambda: True, config).build()
    wanted = num_samples[0] or 0
    if train is not None and len(train) < wanted:
        raise DataError(
            f"there are {len(train)} training samples of --seq-length {args.seq_length}, the run needs "
            f"{wanted}; lower --train-iters, or give each dataset a weight: then datasets repeat"
        )
    if not args.multiple_validation_sets:
        return Datasets(train, valid, test)
    sets = valid if isinstance(valid, list) else [] if valid is None else [valid]
    names = _set_names(sources.blend(1))
    return Datasets(train, None, test, dict(zip(names, sets)))


def _check_identity(
    session: Session, sources: Sources, args: Namespace, pairs: Callable[[str], Sequence[str]]
) -> None:
    """Compare the training data with the checkpoint's, and keep their record for the next; on one rank."""
    if sources.made_up or (dist.is_initialized() and dist.get_rank() != 0):
        return
    data = session.state(TrainingData)
    data.record = record_of(sources, args.split, pairs)
    changed = check_unchanged(data, allowed=bool(args.allow_other_data) or bool(args.skip_train))
    if changed:
        logger.warning("%s", changed)


def _without(num_samples: Sizes, absent: Sequence[bool]) -> Sizes:
    train, valid, test = num_samples
    return 0 if absent[0] else train, 0 if absent[1] else valid, 0 if absent[2] else test


def _set_names(blend: Blend | None) -> list[str]:
    """Return the last part of each path, with its number where that is not unique."""
    prefixes = blend.prefixes if blend else ("made-up",)
    names = [Path(prefix).name for prefix in prefixes]
    return [name if names.count(name) == 1 else f"{name}-{index}" for index, name in enumerate(names)]


def _check_sources(
    sources: Sources,
    tokenizer: Tokenizer,
    shares: _Shares,
    split: str,
    num_samples: Sizes,
    pairs: Callable[[str], Sequence[str]],
) -> None:
    checked = {}
    for prefix in sources.prefixes():
        found = [check_dataset_files(pair, sources.flag_of(prefix)) for pair in pairs(prefix)]
        for files in found:
            _check_tokens(files, tokenizer)
        checked[prefix] = found[0]
    for files in checked.values():
        if sources.shared is not None:
            _check_shares(files, shares, split, num_samples)
    for name, blend in zip(SPLITS, sources.per_split or ()):
        for prefix in blend.prefixes if blend else ():
            if checked[prefix].tokens < 2:
                raise DataError(f"{prefix}: has no text for {name}; leave it out of {blend.flag}")  # type: ignore[union-attr]


def _check_shares(files: DatasetFiles, shares: _Shares, split: str, num_samples: Sizes) -> None:
    begin = 0.0
    for name, share, wanted in zip(SPLITS, shares, num_samples):
        first, last = (round(bound * files.sequences) for bound in (begin, begin + share))
        begin += share
        tokens = int(files.sequence_lengths[first:last].sum(dtype="int64"))
        if wanted != 0 and tokens < 2:
            remedy = "" if name == SPLITS[0] else ", or --eval-iters 0"
            raise DataError(
                f"--split {split!r} leaves no text for {name} in {files.prefix} ({files.sequences} "
                f"documents); give {name} a larger share, or more documents{remedy}"
            )


def _check_tokens(files: DatasetFiles, tokenizer: Tokenizer) -> None:
    largest = largest_token(files)
    if largest >= tokenizer.vocab_size:
        raise DataError(
            f"{files.prefix}.bin contains the id {largest}, the tokenizer has {tokenizer.vocab_size} ids; "
            "name the tokenizer the dataset was made with in --tokenizer-model, or raise --vocab-size"
        )


def rank_by_rank(build: Callable[[], Datasets], args: Namespace) -> Datasets:
    """Build on rank 0, then on the others; a failure anywhere is raised on every rank.

    Mock data leaves no files that others could wait for: every rank builds its own at once.
    """
    at_once = args.mock_data and not args.data_cache_path
    rank = dist.get_rank() if dist.is_initialized() else 0
    built: Datasets | None = None
    for first_turn in (True, False):
        message = ""
        cause: Exception | None = None
        if (rank == 0 or at_once) == first_turn:
            try:
                built = build()
            except Exception as error:
                cause, message = error, _explain(error, args)
        messages = all_gather_values(message)
        if isinstance(cause, UserError):
            raise cause
        if cause is not None:
            raise DataError(message) from cause
        for other, text in enumerate(messages):
            if text:
                raise DataError(f"{text} (rank {other})")
    assert built is not None
    return built


def _explain(error: Exception, args: Namespace) -> str:
    if isinstance(error, UserError):
        return str(error)
    where = "made-up samples" if args.mock_data else " ".join(data_sources(args).prefixes()[:4])
    if isinstance(error, OSError):
        return (
            f"the datasets of {where} cannot be indexed ({error}); name a folder that every rank can write "
            "to and read from in --data-cache-path"
        )
    cache = args.data_cache_path or "the 'cache' folder beside the dataset"
    return (
        f"the datasets of {where} cannot be built ({type(error).__name__}: {error}); delete {cache} and try "
        "again"
    )
