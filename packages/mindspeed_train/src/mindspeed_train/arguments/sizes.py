"""Refusal of a start that cannot fit: weights and the index of samples against the memory of a rank.

Both numbers are lower bounds that need no allocation. Validation alone does not ask: a plan for a cluster is
checked on a small machine.
"""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from mindspeed_core.errors import ArgumentError
from mindspeed_core.platforms.process_memory import attainable_bytes
from mindspeed_megatron.model_record import feature_facts
from mindspeed_train.arguments.errors import argument_error, option

if TYPE_CHECKING:
    from mindspeed_core.session import Session

_GIB = 2**30
_LAYER_OBJECTS = 32 * 1024
"""Bytes of the Python objects of a layer, at the very least."""
_SAMPLE = 12
"""Bytes of a sample in megatron-core's index: its place (two int32), and its turn (uint32)."""
_MORE = "lower it, or start on more or larger machines"
_NO_MEMORY = ("can't allocate memory", "out of memory", "not enough memory", "size calculation overflowed")
_STAGES = ("build_model", "build_model_chunk", "build_layer_spec")


def check_weights_fit(session: Session, args: Namespace) -> None:
    """Refuse a model whose weights alone exceed the memory of a rank's device.

    A model that a feature builds, or whose layers it replaces, is not counted.

    Raises:
        ArgumentError: names the largest size, the bytes it needs at least and those there are.
    """
    if any(name in session.plan.names for stage in _STAGES for name in session.implementations(stage)):
        return
    parts = _weights(session, args)
    device = session.platform.total_memory()
    needed = sum(parts.values()) * args.params_dtype.itemsize
    if needed > device:
        largest = _to_lower(session, args, max(parts, key=lambda name: parts[name]))
        raise _too_large(args, largest, needed, device, "for its weights")
    layers = args.num_layers / args.pipeline_model_parallel_size
    needed, memory = layers * _LAYER_OBJECTS, attainable_bytes()
    if needed > memory:
        raise _too_large(args, "num_layers", needed, memory, "for its layers")


def exhausted(session: Session, args: Namespace, error: Exception) -> ArgumentError | None:
    """Return the error about the size that weighs most, where building the model ran out of memory."""
    text = str(error).partition("\n")[0]
    if not isinstance(error, MemoryError) and not any(sign in text.lower() for sign in _NO_MEMORY):
        return None
    parts = _weights(session, args)
    name = _to_lower(session, args, max(parts, key=lambda name: parts[name]))
    reason = f"there is no memory for a model of this size ({text or 'MemoryError'})"
    return argument_error(args, option(name), reason, _MORE)


def check_index_fits(args: Namespace, samples: tuple[int, int | None, int]) -> None:
    """Refuse more samples than the memory of the machine has room to index.

    Args:
        args: the arguments.
        samples: samples of train, validation and test; None for one pass over the split.

    Raises:
        ArgumentError: names the flag that asks for most of them.
    """
    train, valid, test = (count or 0 for count in samples)
    memory = attainable_bytes()
    for count, first in ((train, "train_iters"), (max(valid, test), "eval_iters")):
        if count * _SAMPLE <= memory:
            continue
        names = [first, "train_iters", "micro_batch_size", "global_batch_size"]
        if first == "train_iters" and args.train_samples:
            names = ["train_samples"]
        name = max(names, key=lambda name: getattr(args, name) or 0)
        raise _too_large(args, name, count * _SAMPLE, memory, f"for the index of {count:,} samples")


def _weights(session: Session, args: Namespace) -> dict[str, float]:
    """Return the parameters of a rank on average, by the flag that they follow from most."""
    across = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    experts_across = (
        args.expert_tensor_parallel_size * args.expert_model_parallel_size * args.pipeline_model_parallel_size
    )
    if args.use_megatron_fsdp or args.use_torch_fsdp2:
        across = experts_across = args.world_size
    hidden, gated = args.hidden_size, 1 + _gated(session, args)
    heads = args.kv_channels * args.num_attention_heads
    attention = 0 if args.multi_latent_attention else 2 * hidden * heads
    matrices = hidden * (1 + gated)
    of_layers = float(args.num_layers) * attention / across
    tables = 1 + bool(args.untie_embeddings_and_output_weights)
    of_vocabulary = float(args.padded_vocab_size) * hidden * tables / across
    parts = {"hidden_size": of_layers, "vocab_size": of_vocabulary}
    if args.position_embedding_type == "learned_absolute":
        # Every rank of the first pipeline stage holds all positions.
        parts["seq_length"] = float(args.max_position_embeddings) * hidden
        if args.use_megatron_fsdp or args.use_torch_fsdp2 or args.pipeline_model_parallel_size > 1:
            parts["seq_length"] /= args.world_size
    if args.num_experts is None:
        parts["ffn_hidden_size"] = float(args.num_layers) * matrices * args.ffn_hidden_size / across
    elif args.moe_layer_freq == 1:
        of_expert = matrices * args.moe_ffn_hidden_size
        parts["num_experts"] = float(args.num_layers) * args.num_experts * of_expert / experts_across
    return parts


def _gated(session: Session, args: Namespace) -> bool:
    """Return whether MLPs have a gate, by megatron-core's flags or by what a feature says of the model."""
    flags = bool(args.swiglu or args.quick_geglu)
    return bool(feature_facts(session, args).get("gated_linear_unit", flags))


def _to_lower(session: Session, args: Namespace, name: str) -> str:
    """Return the size that was given, where the one that weighs most follows from others."""
    if name in ("hidden_size", "ffn_hidden_size") and args.num_layers > args.hidden_size:
        return "num_layers"
    if name == "seq_length" and session.provenance.get("max_position_embeddings", "default") != "default":
        return "max_position_embeddings"
    return name if session.provenance.get(name, "default") != "default" else "hidden_size"


def _too_large(args: Namespace, name: str, needed: float, available: float, purpose: str) -> ArgumentError:
    found = f"{available / _GIB:,.1f} GiB that there are"
    reason = f"a rank needs at least {needed / _GIB:,.1f} GiB {purpose}, of {found}"
    return argument_error(args, option(name), reason, _MORE)
