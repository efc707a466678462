"""Micro-batches of instruction data for a training loop of your own.

A library session leaves data to the caller, and so no flag of instruction data goes there.
`instruction_batches` gives the same micro-batches in the same order as ``mindspeed-train`` with these flags.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.utils import Split

from mindspeed_core.run import Datasets, Sampling
from mindspeed_megatron.micro_batches import micro_batches
from mindspeed_models.data.collate import MULTIPLE, Collate, Lengths
from mindspeed_models.data.instruction_dataset import AlignedInstructionDataset, InstructionDataset
from mindspeed_models.data.length_groups import grouped_batches
from mindspeed_models.data.packing import PackedSamples, packed_batches
from mindspeed_models.data.script_tokenizer import IdTokenizer
from mindspeed_models.data.settings import packed_prefixes
from mindspeed_train.interface import check_dataset_files

_ENDLESS = 1 << 40
"""Samples: more than anybody draws."""


def instruction_batches(
    prefix: str,
    *,
    seq_length: int,
    micro_batch_size: int,
    vocab_size: int,
    num_samples: int | None = None,
    consumed_samples: int = 0,
    dp_rank: int = 0,
    dp_size: int = 1,
    seed: int = 1234,
    variable: bool = False,
    multiple: int = MULTIPLE,
    group_by_length: int = 0,
    pack: bool = False,
    keep_last_token: bool = False,
    padding: int = 0,
) -> Iterator[dict[str, Any]]:
    """Yield the micro-batches of a data-parallel rank.

    Hand ``padding_mask`` to a model of experts (``model(..., padding_mask=batch["padding_mask"])``): what
    fills up then reaches no expert and counts in no loss of theirs. Divide the sum of losses by the tokens
    that count in the whole step (``calculate_per_token_loss``). With ``pack`` positions begin again at each
    sample, and something has to keep attention within it.

    Args:
        prefix: of three pairs of files, as ``mindspeed-models preprocess`` writes them.
        seq_length: tokens of the longest row.
        micro_batch_size: rows of a micro-batch.
        vocab_size: ids of the tokenizer.
        num_samples: after which the samples end; None for no end, every epoch in an order of its own.
        consumed_samples: rows that all ranks together have used before.
        dp_rank: this rank within data parallelism.
        dp_size: number of data-parallel ranks.
        seed: of the order of samples.
        variable: fill rows up to the longest of the micro-batch only.
        multiple: of which the lengths of such rows are.
        group_by_length: samples of a step, where those of similar lengths are to share one; 0 for any.
        pack: put several samples in a row.
        keep_last_token: labels stand at the tokens that they are predicted from.
        padding: the id that fills up.

    Yields:
        ``tokens``, ``labels``, ``position_ids`` ``[b, s]`` int64, ``loss_mask`` float32 and ``padding_mask``
        bool, True where a position fills up.

    Raises:
        DataError: files are missing or damaged, or hold ids beyond the vocabulary.
        ValueError: options contradict each other.
    """
    if pack and (variable or group_by_length):
        raise ValueError("pack fills every row up to seq_length; leave variable and group_by_length out")
    for pair in packed_prefixes(prefix):
        check_dataset_files(pair)
    kind = AlignedInstructionDataset if keep_last_token else InstructionDataset
    names = OrderedDict(class_name="IdTokenizer", vocab_size=vocab_size)
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=([prefix], None),
        split="1,0,0",
        tokenizer=IdTokenizer(vocab_size, unique_identifiers=names),
        reset_position_ids=pack,
        reset_attention_mask=pack,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    wanted = _ENDLESS if num_samples is None else num_samples
    files = kind.build_low_level_dataset(prefix, config)
    dataset: Any = kind(files, prefix, np.arange(len(files)), wanted, Split.train, config)
    collate = Collate(Lengths(seq_length, not variable, multiple), padding)
    found = Datasets(train=dataset, collate=collate)
    if pack:
        dataset = PackedSamples(dataset)
        found = Datasets(
            train=dataset, collate=collate, batch_sampler=partial(packed_batches, room=seq_length)
        )
    elif group_by_length:
        order = partial(grouped_batches, global_batch_size=group_by_length)
        found = Datasets(train=dataset, collate=collate, batch_sampler=order)
    sampling = Sampling(
        dataset=dataset,
        split="train",
        consumed_samples=consumed_samples,
        micro_batch_size=micro_batch_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
        endless=False,
        seed=seed,
    )
    return micro_batches(found, sampling, num_workers=0, pin_memory=False, owner="instruction-data")
