"""The settings that scripts of core_v0.18 and later hand to ``pretrain``, filled from arguments read before.

The session is open by then. From core_v0.19 on the model comes from a builder that the settings name, in
place of a function of the script.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspeed_megatron.hosts.megatron_lm import NAME, model, parallel
from mindspeed_megatron.hosts.megatron_lm.flag_ownership import still_values

if TYPE_CHECKING:
    from mindspeed_megatron.hosts.megatron_lm.pretrain_call import PretrainCall


def take_over_settings(now: PretrainCall, settings: Any) -> None:
    """Let the model of these settings be built through its stages, and features have the flags they claim.

    Args:
        now: the call of ``pretrain``, with an open session.
        settings: Megatron-LM's container, changed until the session closes.
    """
    session = now.session
    recording = getattr(settings, "profiling", None)
    for name, still in still_values(session).items():
        if hasattr(recording, name):
            session.instances.set(NAME, recording, name, still)
    chosen = getattr(settings, "model", None)
    if chosen is not None:
        builder = _through_stages(now, chosen.get_builder_cls())
        session.instances.set(NAME, chosen, "get_builder_cls", lambda: builder)


def _through_stages(now: PretrainCall, kind: type) -> type:
    """Return a builder of models like ``kind``, whose chunks and their wrappers come from stages."""

    class Builder(kind):
        def build_model(self, pg_collection: Any, *rest: Any, **named: Any) -> Any:
            parallel.seed_before_model(now)
            build = super().build_model
            return model.provide(now, build, (pg_collection, *rest), named, self._model_config.transformer)

        def build_distributed_models(self, *args: Any, **named: Any) -> Any:
            build = super().build_distributed_models

            def hand_over(provider: Any) -> None:
                object.__setattr__(self, "build_model", provider)

            return model.distribute(now, build, args, named, hand_over)

    Builder.__name__, Builder.__qualname__ = kind.__name__, kind.__qualname__
    return Builder
