"""Weights in a NumPy archive: full tensors by logical name, read into any layout.

Names and places come from the model's ``sharded_state_dict``; ``.npz`` files without pickled objects are safe
to read from anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.utils import unwrap_model

from mindspeed_core.errors import CheckpointError
from mindspeed_core.run import LoadInfo

if TYPE_CHECKING:
    from mindspeed_core.run import Run


@torch.no_grad()
def load(run: Run, name: str) -> LoadInfo:
    """Fill the parameters and start at step 0."""
    path = Path(name)
    try:
        archive = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"--toy-weights-file {path}: cannot be read: {error}") from error
    with archive:
        for entry in _entries(run):
            if entry.key not in archive:
                raise CheckpointError(f"--toy-weights-file {path}: lacks {entry.key}")
            entry.data.copy_(torch.from_numpy(archive[entry.key][entry.global_slice()]))
    if run.optimizer is not None:
        run.optimizer.reload_model_params()
    return LoadInfo(path)


def export_final_norm(run: Run, path: Path) -> None:
    """Write the final norm from the rank that has it first."""
    own = {e.key: e.data.detach().cpu().numpy() for e in _entries(run) if "final_layernorm" in e.key}
    if own and run.pg.tp.rank() == 0 and run.pg.dp.rank() == 0:
        np.savez(path, **own)


def _entries(run: Run) -> Iterator[Any]:
    for chunk in unwrap_model(run.model):
        described = chunk.sharded_state_dict(metadata={"non_homogeneous_layers": True})
        yield from (entry for entry in described.values() if isinstance(entry, ShardedTensor))
