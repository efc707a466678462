"""Datasets, their iterators and the micro-batch: interceptions and defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from megatron.core.models.gpt import GPTModel
from megatron.core.models.mamba import MambaModel

from mindspeed_core.errors import UserError
from mindspeed_core.feature import hookimpl
from mindspeed_core.hosts.megatron_lm import pretrain_call
from mindspeed_core.hosts.megatron_lm.batches import FIELDS, SLOT, SPLIT, splits_sequences
from mindspeed_core.hosts.megatron_lm.pretrain_call import PretrainCall, intercepts
from mindspeed_core.megatron.unwrap import unwrap
from mindspeed_core.run import Batch, DataIterators, Datasets

if TYPE_CHECKING:
    from mindspeed_core.run import Run


@hookimpl(trylast=True)
def build_datasets(num_samples: tuple[int, int | None, int]) -> Datasets:
    """Build the script's datasets."""
    train, valid, test = pretrain_call.current().pending("build_datasets")(list(num_samples))
    return Datasets(train, valid, test)


@intercepts(run=True)
def around_build_iterators(now: PretrainCall, original: Callable[..., Any], provider: Any) -> Any:
    """Intercept ``build_train_valid_test_data_iterators``, called for each chunk of the model."""
    with now.calling("build_data_iterators", lambda: original(provider)):
        data: DataIterators = now.session.call("build_data_iterators", run=now.sync_run())
    now.run.data = data
    train, valid, test = (_single(part) for part in (data.train, data.valid, data.test))
    now.test_iterators.append(test)
    return train, valid, test


def _single(iterators: list[Any] | None) -> Any:
    return iterators[0] if iterators else None


@hookimpl(trylast=True)
def build_data_iterators() -> DataIterators:
    """Build Megatron-LM's iterators of one chunk."""
    train, valid, test = pretrain_call.current().pending("build_data_iterators")()
    return DataIterators([train], [valid], [test])


@hookimpl(trylast=True)
def get_batch(run: Run, data_iterator: Iterator[Any]) -> Batch:
    """Get the script's batch: ``[b, s]`` tokens, labels, loss mask and positions.

    Raises:
        UserError: the script trains another kind of model, whose batch has other parts.
    """
    values = pretrain_call.current().pending("get_batch")(data_iterator)
    if not isinstance(unwrap(run.model[0]), (GPTModel, MambaModel)) or len(values) not in (5, 6):
        raise UserError(
            "an active feature works on the parts of a batch, which are known of GPT and Mamba scripts alone"
            "; drop its flag for this script"
        )
    batch = Batch(**dict(zip(FIELDS, values)))
    if splits_sequences(pretrain_call.current()):
        _check_whole(run, batch)
    return batch


def _check_whole(run: Run, batch: Batch) -> None:
    """Refuse sequences that the script has split already, by other means than those that were taken over."""
    length = next((part.shape[1] for part in (batch.tokens, batch.labels) if part is not None), None)
    feature = run.session.plan.slots[SLOT]
    if batch.packed_seq_params is not None:
        raise UserError(
            f"{feature}: the script packs samples by itself, and splits them; drop its flag for that"
        )
    if length not in (None, run.args.seq_length):
        raise UserError(
            f"{feature}: the script's get_batch gives sequences of {length} tokens where --seq-length is "
            f"{run.args.seq_length}: it splits them by itself, and not by its {SPLIT}"
        )
