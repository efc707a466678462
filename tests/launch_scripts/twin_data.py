"""Made-up conversations for twins of scripts that train on instruction data."""

from __future__ import annotations

from pathlib import Path

_SAMPLES = 1024
"""More than any twin reads in a round."""
_SHORTEST, _LONGEST = 6, 30
"""Tokens of a sample, of which a third is its prompt; they fit into the rows of a twin."""
_VOCABULARY = 128


def write_conversations(folder: Path) -> None:
    """Write samples as `mindspeed-models preprocess` does, as ``conversations`` in a folder."""
    import numpy as np

    from mindspeed_train.interface import write_index

    generator = np.random.RandomState(7)
    # A sample loses a token where labels are shifted.
    lengths = generator.randint(_SHORTEST, _LONGEST, size=_SAMPLES) + 1
    ids = [generator.randint(3, _VOCABULARY - 1, size=length).astype(np.int32) for length in lengths]
    labels = [np.where(np.arange(len(row)) < len(row) // 3, -100, row).astype(np.int32) for row in ids]
    masks = [np.ones(len(row), dtype=np.int32) for row in ids]
    for name, rows in (("input_ids", ids), ("labels", labels), ("attention_mask", masks)):
        prefix = folder / f"conversations_packed_{name}_document"
        prefix.with_suffix(".bin").write_bytes(np.concatenate(rows).tobytes())
        write_index(prefix.with_suffix(".idx"), lengths.astype(np.int32), np.dtype(np.int32))
