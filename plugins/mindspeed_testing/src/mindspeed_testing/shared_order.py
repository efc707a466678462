"""The order of made-up samples, shuffled once for all worlds.

megatron-core shuffles all samples of its mock data, millions of them, for trainings that read a dozen: a
third of a second in each process. The fork server shuffles those of the usual lengths for its children.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from megatron.core.datasets import gpt_dataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

from mindspeed_train.interface import MadeUpDataset, NullTokenizer, index_builders

LENGTHS = (16, 32)
"""``--seq-length`` of most trainings in tests."""
_SEED, _SPLIT = 1234, "969, 30, 1"
_log = logging.getLogger(gpt_dataset.__name__)


def shared(shuffled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function like megatron-core's ``_build_shuffle_index`` that remembers what it returned."""
    known: dict[tuple[object, ...], tuple[Any, Any]] = {}

    def remembered(num_samples: int, total_size: int, numpy_random_state: np.random.RandomState) -> Any:
        before: Any = numpy_random_state.get_state(legacy=True)
        key = (num_samples, total_size, before[1].tobytes(), before[2:])
        if key not in known:
            order = shuffled(num_samples, total_size, numpy_random_state)
            known[key] = order, numpy_random_state.get_state(legacy=True)
        order, state = known[key]
        numpy_random_state.set_state(state)
        return order

    return remembered


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep megatron-core from saying that it saves no index."""
    before, _log.disabled = _log.disabled, True
    try:
        yield
    finally:
        _log.disabled = before


def share_orders() -> None:
    """Shuffle the samples of the usual lengths, and let this process and its children find their order."""
    gpt_dataset._build_shuffle_index = shared(gpt_dataset._build_shuffle_index)
    for length in LENGTHS:
        config = GPTDatasetConfig(
            random_seed=_SEED,
            sequence_length=length,
            path_to_cache=None,
            split=_SPLIT,
            tokenizer=NullTokenizer(128),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
        )
        # Samples for training only, as without --eval-iters.
        config.split_matrix = [config.split_matrix[0], None, None]
        with index_builders(), _quiet():
            BlendedMegatronDatasetBuilder(MadeUpDataset, [1, 0, 0], lambda: True, config).build()
