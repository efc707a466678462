"""The script's own functions, which ``pretrain`` gets as arguments, as stages: no symbol is changed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mindspeed_core.hosts.megatron_lm.batches import take_over_batches
from mindspeed_core.run import Datasets

if TYPE_CHECKING:
    from mindspeed_core.hosts.megatron_lm.pretrain_call import Running


def take_over(running: Running, arguments: dict[str, Any]) -> None:
    """Replace arguments of ``pretrain`` by functions that call stages where a feature wants them.

    Args:
        running: the call of ``pretrain``.
        arguments: its bound arguments; changed in place.
    """
    provider = next((name for name in arguments if name.startswith("train_valid_test_dataset")), "")
    if provider:
        arguments[provider] = _datasets_provider(running, arguments[provider])
    if "model_provider" in arguments:
        arguments["model_provider"] = _model_provider(running, arguments["model_provider"])
    if "forward_step_func" in arguments:
        original = arguments["forward_step_func"]
        arguments["forward_step_func"] = _forward_step(running, original)
        running.script_opened = lambda: take_over_batches(running, original)


def _datasets_provider(running: Running, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def provider(num_samples: Any, *rest: Any, **named: Any) -> Any:
        if not running.wants("build_datasets"):
            return original(num_samples, *rest, **named)
        session = running.opened()
        with running.calling("build_datasets", lambda wanted: original(wanted, *rest, **named)):
            datasets: Datasets = session.call(
                "build_datasets", args=session.args, num_samples=tuple(num_samples)
            )
        return datasets.train, datasets.valid, datasets.test

    # Megatron-LM looks the attribute up, and the name vp_stage in the signature, which `wraps` keeps.
    provider.is_distributed = getattr(original, "is_distributed", False)  # type: ignore[attr-defined]
    return provider


def _model_provider(running: Running, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def provider(*args: Any, **named: Any) -> Any:
        if not running.wants("build_model_chunk"):
            return original(*args, **named)
        from mindspeed_core.hosts.megatron_lm.model import build_chunk

        return build_chunk(running, original, args, named)

    return provider


def _forward_step(running: Running, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward_step(data_iterator: Any, model: Any, *rest: Any, **named: Any) -> Any:
        if not running.wants("forward_step", "compute_loss", "get_batch"):
            return original(data_iterator, model, *rest, **named)
        from mindspeed_core.hosts.megatron_lm.step import enter_microbatch

        session, run = running.opened(), running.present()
        enter_microbatch(running, model)
        with running.calling(
            "forward_step", lambda iterator, chunk: original(iterator, chunk, *rest, **named)
        ):
            return session.call(
                "forward_step",
                run=run,
                data_iterator=data_iterator,
                model_chunk=model,
                return_schedule_plan=bool(named.get("return_schedule_plan", False)),
            )

    return forward_step
