"""The library host: sessions inside somebody else's training loop on megatron-core.

The loop, the model and the data are the caller's; the stages are functions of the session, each of which
passes one thing of the caller's through the active features. The defaults return what they are given.
"""

from __future__ import annotations

from mindspeed_core.discovery.host import HostDeclaration

HOST = HostDeclaration(
    name="library",
    summary="a session inside your own training loop on megatron-core",
    flags="mindspeed_megatron.hosts.library.flags:host_flags",
    stages=(
        *(f"mindspeed_megatron.hosts.library.{name}" for name in ("parallel", "model", "optimizer", "step")),
        *(
            f"mindspeed_megatron.{name}"
            for name in ("boundary chunk_places data_parallel schedule token_losses loss_reduction".split())
        ),
        "mindspeed_core.hooks.defaults",
    ),
    session="mindspeed_megatron.hosts.library.session:LibrarySession",
    absent="mindspeed_megatron.hosts.library.flags:why_absent",
    notes="mindspeed_megatron.expert_notes:notes",
    never_calls=(
        "process_group_options",
        "seed_everything",
        "build_model_chunk",
        "build_mtp_spec",
        "build_tokenizer",
        "build_datasets",
        "build_data_iterators",
        "batch_fields",
        "load_checkpoint",
        "model_state",
        "save_checkpoint",
        "evaluate",
        "should_stop",
    ),
)
