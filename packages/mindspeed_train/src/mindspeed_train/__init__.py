"""The standalone host: training on megatron-core from PyPI, without a Megatron-LM checkout.

Flag names and semantics are Megatron-LM's, parts are megatron-core's; this package only joins them. Each
module is one group of stage defaults, or a piece that those stages use; the folders are their subjects.
"""

from __future__ import annotations

from mindspeed_core.discovery.host import HostDeclaration

__version__ = "0.1.0"

_HERE = "mindspeed_train."
_STAGES = (
    _HERE + "arguments.validate",
    _HERE + "parallel",
    _HERE + "model.config",
    "mindspeed_megatron.layers",
    "mindspeed_megatron.chunk_places",
    _HERE + "model.build",
    "mindspeed_megatron.boundary",
    "mindspeed_megatron.data_parallel",
    _HERE + "text.stages",
    _HERE + "data.stages",
    _HERE + "optimizer",
    "mindspeed_megatron.gradients",
    "mindspeed_megatron.schedule",
    "mindspeed_megatron.token_losses",
    _HERE + "losses",
    _HERE + "step",
    _HERE + "evaluation",
    "mindspeed_megatron.model_state",
    _HERE + "checkpoint.stages",
    _HERE + "monitoring.reporting",
    "mindspeed_core.hooks.defaults",
)

HOST = HostDeclaration(
    name="standalone",
    summary="trains GPT models with megatron-core from PyPI",
    flags="mindspeed_train.flags:host_flags",
    stages=_STAGES,
    train="mindspeed_train.loop:train",
    notes="mindspeed_megatron.expert_notes:notes",
    completes=_HERE + "arguments.from_checkpoint:complete",
    infers=_HERE + "arguments.inference:settle",
    stand_downs=_HERE + "arguments.stand_downs:stand_down",
    commands={
        "data": (
            _HERE + "data.check_command:command",
            "check tokenized datasets: data check PREFIX",
        ),
        "inspect": (
            _HERE + "checkpoint.inspection:command",
            "show what a checkpoint holds and whether it is intact",
        ),
        "prepare-text": (_HERE + "text.prepare:command", "turn text into a dataset"),
        "sample": (_HERE + "sample:command", "continue a prompt with a trained model"),
    },
)
