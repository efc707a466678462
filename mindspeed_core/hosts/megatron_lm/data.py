"""Datasets, their iterators and the micro-batch: interceptions and defaults."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from megatron.core.models.gpt import GPTModel
from megatron.core.models.mamba import MambaModel

from mindspeed_core.errors import UserError
from mindspeed_core.feature import hookimpl
from mindspeed_core.hosts.megatron_lm import running
from mindspeed_core.hosts.megatron_lm.emulation import keeps_generator
from mindspeed_core.hosts.megatron_lm.script import FIELDS
from mindspeed_core.hosts.standalone.model.build import unwrap
from mindspeed_core.run import Batch, DataIterators, Datasets

if TYPE_CHECKING:
    from mindspeed_core.run import Run


@hookimpl(trylast=True)
def build_datasets(num_samples: tuple[int, int | None, int]) -> Datasets:
    """The script's datasets."""
    train, valid, test = running.current().pending("build_datasets")(list(num_samples))
    return Datasets(train, valid, test)


def around_build_iterators(original: Callable[..., Any]) -> Callable[..., Any]:
    """``build_train_valid_test_data_iterators``, called for each chunk of the model."""

    @functools.wraps(original)
    def build_iterators(provider: Any) -> Any:
        now = running.find()
        if now is None or now.session is None:
            return original(provider)
        build = keeps_generator(original) if now.session.platform.device_type == "cpu" else original
        if now.run is None or not now.wants("build_data_iterators", "evaluate"):
            return build(provider)
        with now.calling("build_data_iterators", lambda: build(provider)):
            data: DataIterators = now.session.call("build_data_iterators", run=now.present())
        now.run.data = data
        train, valid, test = (_single(part) for part in (data.train, data.valid, data.test))
        now.test_iterators.append(test)
        return train, valid, test

    return build_iterators


def _single(iterators: list[Any] | None) -> Any:
    return iterators[0] if iterators else None


@hookimpl(trylast=True)
def build_data_iterators() -> DataIterators:
    """Megatron-LM's iterators of one chunk."""
    train, valid, test = running.current().pending("build_data_iterators")()
    return DataIterators([train], [valid], [test])


@hookimpl(trylast=True)
def get_batch(run: Run, data_iterator: Iterator[Any]) -> Batch:
    """The script's batch: ``[b, s]`` tokens, labels, loss mask and positions.

    Raises:
        UserError: the script trains another kind of model, whose batch has other parts.
    """
    values = running.current().pending("get_batch")(data_iterator)
    if not isinstance(unwrap(run.model[0]), (GPTModel, MambaModel)) or len(values) not in (5, 6):
        raise UserError(
            "an active feature works on the parts of a batch, which are known of GPT and Mamba scripts alone"
            "; drop its flag for this script"
        )
    return Batch(**dict(zip(FIELDS, values)))
