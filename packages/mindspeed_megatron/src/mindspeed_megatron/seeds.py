"""Megatron-LM's rule of seeds."""

from __future__ import annotations

import random
from argparse import Namespace
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection


def seed_of_rank(args: Namespace, pg: ProcessGroupCollection) -> int:
    """Return this rank's seed: pipeline stages differ, data-parallel ranks only where asked."""
    seed: int = args.seed + 100 * pg.pp.rank()
    if args.data_parallel_random_init:
        seed += 10 * pg.dp.rank()
    return seed


def seed_generators(seed: int, *trackers: Any) -> None:
    """Seed Python, numpy, torch and megatron-core's generators of tensor parallelism with a `seed_of_rank`.

    ``trackers`` are megatron-core's choice of the random number trackers, its own by default.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, *trackers)
