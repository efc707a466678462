"""The small dataset on which both programs are compared: documents of a noisy counting sequence."""

from __future__ import annotations

from pathlib import Path

import numpy as np

VOCABULARY = 255
DOCUMENTS = 400


def write_corpus(prefix: Path) -> None:
    """Write ``prefix.bin`` and ``prefix.idx``, the same bytes every time.

    Ids are below `VOCABULARY`, the ``--vocab-size`` of ``--tokenizer-type NullTokenizer``, whose end of a
    document is the id above.
    """
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    generator = np.random.default_rng(20)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(DOCUMENTS):
        length = int(generator.integers(20, 200))
        start, stride = generator.integers(0, VOCABULARY, size=2)
        ids = (start + stride * np.arange(length)) % VOCABULARY
        noisy = generator.random(length) < 0.1
        ids[noisy] = generator.integers(0, VOCABULARY, size=int(noisy.sum()))
        builder.add_item(torch.from_numpy(np.append(ids, VOCABULARY).astype(np.int32)))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
