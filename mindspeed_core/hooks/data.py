"""Stages that build datasets and turn samples into the batch that each pipeline stage receives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindspeed_core.hooks.marker import hookspec

if TYPE_CHECKING:
    from argparse import Namespace

    from mindspeed_core.run import Batch, DataIterators, Datasets, Run
    from mindspeed_core.session import Session

__all__ = ["batch_fields", "build_data_iterators", "build_datasets", "build_tokenizer", "get_batch"]


@hookspec(since="1.1")
def build_tokenizer(session: Session, args: Namespace) -> Any:
    """Build the tokenizer of the run.

    Called once per session, while arguments are validated: the model's vocabulary is padded from its
    ``vocab_size`` where ``--vocab-size`` is not given. Datasets, ``run.tokenizer`` and sampling use the same
    object. A tokenizer with more ids than the model's vocabulary is refused.

    Returns:
        An object with ``vocab_size`` (the number of ids, int), ``tokenize(text)`` to a list of ids and
        ``detokenize(ids)`` to text; for megatron-core's datasets also ``eod`` (the id that ends documents),
        ``pad`` (an id, or -1 for none) and ``unique_identifiers`` (an ordered dictionary on which the index
        cache depends).
    """


@hookspec
def build_datasets(
    session: Session, args: Namespace, num_samples: tuple[int, int | None, int]
) -> Datasets | Any:
    """Build the train, validation and test datasets.

    Every rank is called: index files are built by rank 0 while the others wait.

    A feature with data of its own fills the slot ``data-source`` and replaces this stage: its flag takes the
    place of ``--data-path`` and ``--mock-data``. `Datasets` also says how samples become a micro-batch
    (``collate``), and which samples a micro-batch has (``batch_sampler``).

    Args:
        num_samples: samples wanted for train, validation and test; None asks for one pass over the split.
    """


@hookspec
def build_data_iterators(session: Session, run: Run) -> DataIterators | Any:
    """Build the iterators that yield this data-parallel rank's samples, from where the run stands.

    Called after a checkpoint was loaded; ``run.consumed_train_samples`` says how far the data was used.
    """


@hookspec
def batch_fields(
    session: Session, args: Namespace, pre_process: bool, post_process: bool
) -> frozenset[str] | Any:
    """Name the fields of a `Batch` that a pipeline stage needs.

    Called once per chunk and run. The default gives ``tokens`` and ``position_ids`` to the first pipeline
    stage, ``labels`` and ``loss_mask`` to the last, ``attention_mask`` to all that need one. A feature adds
    what a middle pipeline stage needs (document boundaries, for instance) by wrapping this hook.
    """


@hookspec
def get_batch(
    session: Session, run: Run, data_iterator: Iterator[Any], vp_stage: int | None, microbatch: int
) -> Batch | Any:
    """Fetch one micro-batch and keep the fields that this pipeline stage needs.

    Called on **every** pipeline stage, so that a description of the batch (``packed_seq_params``, slices of
    it for context parallelism) reaches attention on middle ones too.

    Args:
        data_iterator: iterator of this chunk.
        microbatch: index of the micro-batch within the step.

    Returns:
        A `Batch`; tokens are ``[b, s]`` int64, ``loss_mask`` is ``[b, s]`` float32.
    """
