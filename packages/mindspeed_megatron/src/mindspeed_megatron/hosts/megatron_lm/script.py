"""The script's own functions, which ``pretrain`` gets as arguments, as stages: no symbol is changed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mindspeed_core.run import Datasets
from mindspeed_megatron.hosts.megatron_lm.batches import take_over_batches
from mindspeed_megatron.hosts.megatron_lm.checkout import SETTINGS

if TYPE_CHECKING:
    from mindspeed_megatron.hosts.megatron_lm.pretrain_call import PretrainCall


def take_over(now: PretrainCall, arguments: dict[str, Any]) -> None:
    """Replace bound arguments of ``pretrain`` by functions that call stages where a feature wants them."""
    provider = next((name for name in arguments if name.startswith("train_valid_test_dataset")), "")
    if provider:
        arguments[provider] = _datasets_provider(now, arguments[provider])
    if arguments.get("model_provider") is not None:
        original = arguments["model_provider"]
        if not now.has_session:
            now.handed = frozenset(inspect.signature(original).parameters)
        arguments["model_provider"] = _model_provider(now, original)
    if SETTINGS in arguments:
        from mindspeed_megatron.hosts.megatron_lm.settings import take_over_settings

        take_over_settings(now, arguments[SETTINGS])
    if "forward_step_func" in arguments:
        original = arguments["forward_step_func"]
        arguments["forward_step_func"] = _forward_step(now, original)
        now.script_opened = lambda: take_over_batches(now, original)
    if now.has_session:
        now.script_opened()


def _datasets_provider(now: PretrainCall, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def provider(num_samples: Any, *rest: Any, **named: Any) -> Any:
        now.generator.keep()
        if not now.wants("build_datasets"):
            return original(num_samples, *rest, **named)
        session = now.session
        with now.calling("build_datasets", lambda wanted: original(wanted, *rest, **named)):
            datasets: Datasets = session.call(
                "build_datasets", args=session.args, num_samples=tuple(num_samples)
            )
        from mindspeed_megatron.hosts.megatron_lm.data import for_script

        return for_script(now, datasets)

    # Megatron-LM looks the attribute up, and the name vp_stage in the signature, which `wraps` keeps.
    provider.is_distributed = getattr(original, "is_distributed", False)  # type: ignore[attr-defined]
    return provider


def _model_provider(now: PretrainCall, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def provider(*args: Any, **named: Any) -> Any:
        from mindspeed_megatron.hosts.megatron_lm import model, parallel

        parallel.seed_before_model(now)
        return model.provide(now, original, args, named)

    return provider


_THROUGH_STAGES = (
    *("forward_step", "compute_token_losses", "compute_loss", "get_batch"),
    *("start_run", "finalize_gradients"),
)


def _forward_step(now: PretrainCall, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward_step(data_iterator: Any, model: Any, *rest: Any, **named: Any) -> Any:
        data_iterator = now.generator.undisturbed_by(data_iterator)
        if not now.wants(*_THROUGH_STAGES) and not now.tells_padding:
            return original(data_iterator, model, *rest, **named)
        from mindspeed_megatron.hosts.megatron_lm import step

        return step.forward(now, original, data_iterator, model, rest, named)

    return forward_step
