"""The Megatron-LM host: the stages of this project inside Megatron-LM's own training scripts.

One line in the script, ``import mindspeed_core.megatron_adaptor``, makes the flags of every installed plugin
work there. `entry` holds what is changed from that line on, `patch_table` the table of what an active
feature changes besides; each other module is one subject of a training, with the interceptions of
Megatron-LM's functions beside the defaults of the stages that they call.
"""

from __future__ import annotations

from mindspeed_core.discovery.host import HostDeclaration

NAME = "megatron-lm"
_HERE = "mindspeed_megatron.hosts.megatron_lm."

HOST = HostDeclaration(
    name=NAME,
    summary="lives inside the training scripts of a Megatron-LM checkout",
    flags=_HERE + "flags:host_flags",
    stages=(
        *(
            _HERE + name
            for name in "parallel tokenizer model optimizer checkpoint data step monitoring".split()
        ),
        "mindspeed_megatron.boundary",
        "mindspeed_megatron.chunk_places",
        "mindspeed_megatron.token_losses",
        "mindspeed_megatron.model_state",
        "mindspeed_core.hooks.defaults",
    ),
    on_demand=_HERE + "needed_patches:patches_for",
    doctor=_HERE + "checkout:findings",
    notes="mindspeed_megatron.expert_notes:notes",
)
