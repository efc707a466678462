"""The Megatron-LM host: the stages of this project inside Megatron-LM's own training scripts.

One line in the script, ``import mindspeed_core.megatron_adaptor``, makes the flags of every installed plugin
work there. `entry` holds what is changed from that line on, `interceptions` the table of what an active
feature changes besides; each other module is one subject of a training, with the interceptions of
Megatron-LM's functions beside the defaults of the stages that they call.
"""

from __future__ import annotations

from mindspeed_core.discovery.host import HostDeclaration

NAME = "megatron-lm"
_STAGES = "parallel model optimizer checkpoint data step monitoring".split()

HOST = HostDeclaration(
    name=NAME,
    summary="lives inside the training scripts of a Megatron-LM checkout",
    flags="mindspeed_core.hosts.megatron_lm.flags:host_flags",
    stages=tuple(f"mindspeed_core.hosts.megatron_lm.{name}" for name in _STAGES),
    on_demand="mindspeed_core.hosts.megatron_lm.patch_table:patches_for",
    doctor="mindspeed_core.hosts.megatron_lm.checkout:findings",
)
