"""The stages of a training run, one pluggy hook each, in the order in which a run passes them.

Read the modules of this package like a manual: `arguments`, `parallel`, `model`, `data`, `step`,
`optimizer`, `checkpoint`, `run`. Every stage is ``firstresult`` unless it says otherwise: the host supplies
the default, a feature *wraps* it (``@hookimpl(wrapper=True)``: code before, ``result = yield``, code after,
``return`` a changed result) or *replaces* it (a plain ``@hookimpl`` that returns something that is not None).

An implementation lists only the arguments it wants. Arguments are never changed in place to pass data on: a
wrapper returns a changed result. A stage that has nothing to return returns `DONE`, since pluggy would take
None for "not handled" and ask the next implementation.

These arguments mean the same in every stage, unless it says otherwise:

- ``session``: the open session.
- ``args``: the validated arguments.
- ``plan``: the active features, and why they are active.
- ``run``: the run in progress.
- ``config``: the result of `build_transformer_config`.
- ``layer_spec``, ``ddp_config``, ``optimizer_config``, ``optimizer``: the result of the ``build_`` stage.
- ``model``: this rank's model chunks.
- ``model_chunk``: the chunk that is run.
- ``pre_process``: the chunk holds the embedding.
- ``post_process``: the chunk holds the output layer.
- ``vp_stage``: virtual pipeline stage of the chunk, None without interleaving.
- ``pg``: the process groups.

Stages run per run, per step or per micro-batch, never per layer.
"""

from __future__ import annotations

from mindspeed_core.hooks.marker import API_VERSION, DONE, Done, hookspec

STAGE_MODULES = (
    "mindspeed_core.hooks.arguments",
    "mindspeed_core.hooks.parallel",
    "mindspeed_core.hooks.model",
    "mindspeed_core.hooks.data",
    "mindspeed_core.hooks.optimizer",
    "mindspeed_core.hooks.step",
    "mindspeed_core.hooks.checkpoint",
    "mindspeed_core.hooks.run",
)

__all__ = ["API_VERSION", "DONE", "STAGE_MODULES", "Done", "hookspec"]
