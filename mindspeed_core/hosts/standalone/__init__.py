"""The standalone host: training on megatron-core from PyPI, without a Megatron-LM checkout.

Flag names and semantics are Megatron-LM's, parts are megatron-core's; this package only joins them. Each
module is one group of stage defaults, or a piece that those stages use; the folders are their subjects.
"""

from __future__ import annotations

from mindspeed_core.feature import HostDeclaration

_STAGES = (
    "arguments parallel model.config model.layers model.build data.stages optimizer step evaluation "
    "checkpoint.stages watching.reporting"
).split()

HOST = HostDeclaration(
    name="standalone",
    summary="trains GPT models with megatron-core from PyPI",
    flags="mindspeed_core.hosts.standalone.flags:host_flags",
    stages=tuple(f"mindspeed_core.hosts.standalone.{name}" for name in _STAGES),
    train="mindspeed_core.hosts.standalone.loop:train",
    absent="mindspeed_core.hosts.standalone.megatron_lm_flags:why_absent",
)
