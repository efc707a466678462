"""Arguments of a session in mode ``inference``: what only a training acts on is left out, with a note.

A script of a training can be given to a generation as it is. What decides numbers of the model stays; what
decides how it is trained goes; what would read something else than the model learned is refused. Torch-free.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, MutableMapping
from typing import Any

from mindspeed_core.errors import ArgumentError
from mindspeed_core.flags.notes import FlagNote
from mindspeed_core.flags.presets import DEFAULT

_NO_GRADIENTS = "nothing is trained, so that nothing is saved for backward"
_NO_STEPS = "there are no training steps to overlap it with"
_ONE_TEXT = "each text of a generation is a document of its own"
_IDLE: tuple[tuple[str, Any, str], ...] = (
    ("sequence_parallel", False, "a step of decoding has one token, which ranks cannot share"),
    ("attention_dropout", 0.0, "nothing is dropped outside of training"),
    ("hidden_dropout", 0.0, "nothing is dropped outside of training"),
    ("recompute_activations", False, _NO_GRADIENTS),
    ("recompute_granularity", None, _NO_GRADIENTS),
    ("recompute_method", None, _NO_GRADIENTS),
    ("recompute_num_layers", None, _NO_GRADIENTS),
    ("recompute_modules", None, _NO_GRADIENTS),
    ("distribute_saved_activations", False, _NO_GRADIENTS),
    ("moe_layer_recompute", False, _NO_GRADIENTS),
    ("cpu_offloading", False, _NO_GRADIENTS),
    ("fine_grained_activation_offloading", False, _NO_GRADIENTS),
    ("overlap_grad_reduce", False, _NO_STEPS),
    ("overlap_param_gather", False, _NO_STEPS),
    ("overlap_param_gather_with_optimizer_step", False, _NO_STEPS),
    ("overlap_moe_expert_parallel_comm", False, _NO_STEPS),
    ("defer_embedding_wgrad_compute", False, _NO_STEPS),
    ("delay_wgrad_compute", False, _NO_STEPS),
    ("moe_pad_expert_input_to_capacity", False, "experts drop no token of a generation"),
    ("reset_attention_mask", False, _ONE_TEXT),
    ("reset_position_ids", False, _ONE_TEXT),
    ("fix_sub_seq_length", -1, _ONE_TEXT),
    ("num_layers_per_virtual_pipeline_stage", None, "a generation passes each pipeline stage once"),
    ("num_virtual_stages_per_pipeline_rank", None, "a generation passes each pipeline stage once"),
    ("microbatch_group_size_per_vp_stage", None, "a generation passes each pipeline stage once"),
)
"""Arguments, what a generation has instead, and why."""
_SPELLED = {
    "microbatch_group_size_per_vp_stage": "--microbatch-group-size-per-virtual-pipeline-stage",
}


def settle(args: Namespace, provenance: MutableMapping[str, str]) -> list[FlagNote]:
    """Leave out what only a training acts on, and give the length of the model's positions; changes both.

    Args:
        args: the parsed arguments.
        provenance: where each came from.

    Returns:
        A note on each flag that was given and is left out.

    Raises:
        ArgumentError: sequences are to be split over ranks.
    """
    size = getattr(args, "context_parallel_size", 1) or 1
    if size > 1:
        raise ArgumentError(
            "--context-parallel-size",
            size,
            "sequences are split where batches of training are read, and this session has none",
            "use 1; a checkpoint loads under another layout",
        )
    if args.seq_length is None and args.max_position_embeddings is not None:
        args.seq_length = args.max_position_embeddings
        provenance["seq_length"] = "--max-position-embeddings, which a generation may use to the end"
    return [*_idle(args, provenance), *_interleaved_layout(args, provenance)]


def _idle(args: Namespace, provenance: MutableMapping[str, str]) -> Iterator[FlagNote]:
    for dest, instead, reason in _IDLE:
        value = getattr(args, dest, instead)
        if value == instead or value is None:
            continue
        setattr(args, dest, instead)
        given = provenance.get(dest, DEFAULT) != DEFAULT
        provenance[dest] = "mode inference"
        if given:
            flag = _SPELLED.get(dest, "--" + dest.replace("_", "-"))
            yield FlagNote(flag if isinstance(value, bool) else f"{flag} {_typed(value)}", reason)


def _interleaved_layout(args: Namespace, provenance: MutableMapping[str, str]) -> Iterator[FlagNote]:
    """Leave out a layout of layers that has more stages than ranks; layers are divided evenly then."""
    layout = getattr(args, "pipeline_model_parallel_layout", None)
    ranks = args.pipeline_model_parallel_size or 1
    if not isinstance(layout, str) or layout.count("|") + 1 <= ranks:
        return
    args.pipeline_model_parallel_layout = None
    provenance["pipeline_model_parallel_layout"] = "mode inference"
    yield FlagNote(
        f"--pipeline-model-parallel-layout {layout}", "a generation passes each pipeline stage once"
    )


def _typed(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
