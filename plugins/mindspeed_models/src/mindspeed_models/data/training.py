"""Datasets, collate and order of instruction data, as the flags ask for them."""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_core.run import Datasets
from mindspeed_models.data.collate import Collate, lengths_of
from mindspeed_models.data.instruction_dataset import (
    AlignedInstructionDataset,
    InstructionDataset,
    in_file_order,
)
from mindspeed_models.data.length_groups import grouped_batches
from mindspeed_models.data.packing import PackedSamples, packed_batches
from mindspeed_models.data.script_tokenizer import script_tokenizer
from mindspeed_models.data.settings import packed_prefixes
from mindspeed_train.interface import check_dataset_files, data_sources, datasets_from_files

if TYPE_CHECKING:
    from mindspeed_core.session import Session

_Sizes = tuple[int, int | None, int]
_SPLIT = "969,30,1"
_OF_THE_HOST: dict[str, Any] = {
    "allow_other_data": True,
    "data_args_path": None,
    "data_cache_path": None,
    "full_validation": False,
    "mmap_bin_files": True,
    "mock_data": False,
    "multiple_validation_sets": False,
    "per_split_data_args_path": None,
    "train_samples": None,
}
"""What the standalone host says besides, where a script of Megatron-LM has no such flag."""


def instruction_datasets(session: Session, args: Namespace, num_samples: _Sizes) -> Datasets:
    """Build the datasets that ``--data-path`` and its relatives name.

    Args:
        session: the open session.
        args: the arguments.
        num_samples: rows wanted for training, validation and test.

    Raises:
        DataError: files are missing or damaged, or do not belong together.
    """
    kind = AlignedInstructionDataset if args.keep_last_token else InstructionDataset
    if args.no_shuffle:
        kind = in_file_order(kind)
    elsewhere = session.host.name != "standalone"
    if elsewhere:
        args = _OfAScript(args)
    wanted = num_samples
    if args.pack_samples and not session.platform.dry_run:
        factor = _samples_of_a_row(args)
        wanted = num_samples[0] * factor, _times(num_samples[1], factor), num_samples[2] * factor
    if elsewhere:
        # A script may build datasets on some ranks only.
        tokenizer = script_tokenizer()
        found = datasets_from_files(
            session, args, wanted, kind, packed_prefixes, tokenizer=tokenizer, collective=False
        )
    else:
        found = datasets_from_files(session, args, wanted, kind, packed_prefixes)
    if session.platform.dry_run:
        return found
    found = replace(found, collate=Collate(lengths_of(args), _padding(found)))
    if args.pack_samples:
        packed = {name: _packed(getattr(found, name)) for name in ("train", "valid", "test")}
        sets = {name: _packed(each) for name, each in found.valid_sets.items()}
        rows = partial(packed_batches, room=args.seq_length, shuffled=not args.no_shuffle)
        return replace(found, **packed, valid_sets=sets, batch_sampler=rows)
    if args.group_by_length:
        order = partial(grouped_batches, global_batch_size=args.global_batch_size)
        return replace(found, batch_sampler=order)
    return found


def _of_the_host(name: str) -> Any:
    if name not in _OF_THE_HOST:
        raise AttributeError(name)
    return _OF_THE_HOST[name]


class _OfAScript(Namespace):
    """Arguments of a script, with what the standalone host says besides."""

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self.split = getattr(args, "split", None) or _SPLIT

    def __getattr__(self, name: str) -> Any:
        """Return an argument of the script, or the host's."""
        if name == "_args":
            raise AttributeError(name)
        args = self._args
        return getattr(args, name) if hasattr(args, name) else _of_the_host(name)


def _times(count: int | None, factor: int) -> int | None:
    return None if count is None else count * factor


def _packed(dataset: Any) -> Any:
    return None if dataset is None else PackedSamples(dataset)


def _samples_of_a_row(args: Namespace) -> int:
    """Return how many samples may be needed for a row, so that no sample comes again before its turn."""
    sources = data_sources(args)
    blends = [sources.blend(split) for split in range(3)]
    prefixes = {prefix for blend in blends if blend for prefix in blend.prefixes}
    means = []
    for prefix in prefixes:
        lengths = check_dataset_files(packed_prefixes(prefix)[0]).sequence_lengths
        means.append(float(np.minimum(lengths, args.seq_length).mean()))
    return max(1, math.ceil(args.seq_length / max(min(means), 1.0)))


def _padding(datasets: Datasets) -> int:
    """Return the token that fills up: the tokenizer's, or any one."""
    splits = (datasets.train, datasets.valid, datasets.test, *datasets.valid_sets.values())
    tokenizer = next(each for each in splits if each is not None).config.tokenizer
    padding = getattr(tokenizer, "pad", -1)
    return padding if isinstance(padding, int) and padding >= 0 else 0
