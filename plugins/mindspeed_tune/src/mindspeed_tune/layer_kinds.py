"""Kinds of the layers of a model, by its configuration, and passes over some of its layers only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mindspeed_tune.record import Stage


def layer_kinds(config: Any) -> list[str]:
    """Return the kind of every layer of a model: ``dense``, ``moe``, with what else tells layers apart."""
    layers = config.num_layers
    routed, windowed = _routed(config), _windowed(config)
    several = len(set(windowed)) > 1
    kinds = [
        ("moe" if routed[n] else "dense") + (" window" if several and windowed[n] else "")
        for n in range(layers)
    ]
    if getattr(config, "heterogeneous_block_specs", False):
        return [f"{kind} {n}" for n, kind in enumerate(kinds)]
    return kinds


def stages_of(config: Any, chunks: int) -> tuple[Stage, ...]:
    """Return the contents of every pipeline stage.

    Args:
        config: megatron-core's, of the model.
        chunks: of every rank.
    """
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    kinds, size = layer_kinds(config), config.pipeline_model_parallel_size
    found = []
    for place in range(size):
        held = []
        for chunk in range(chunks):
            virtual = chunk if chunks > 1 else None
            count = get_num_layers_to_build(config, virtual, place)
            first = get_transformer_layer_offset(config, virtual, place)
            held.append(tuple(kinds[first : first + count]))
        last = place == size - 1
        predictions = (getattr(config, "mtp_num_layers", None) or 0) if last else 0
        found.append(Stage(tuple(held), place == 0, last, predictions))
    return tuple(found)


def exact_because(config: Any, chunks: Sequence[Any]) -> str:
    """Return why all layers of a model have to run; empty where two of each kind tell everything.

    A model's last layer, of which features that offload leave out what its backward needs at once, counts
    like those before it.
    """
    if getattr(config, "recompute_granularity", None) == "full":
        if config.recompute_method == "block":
            if any(map(_recomputes_some, _blocks(chunks))):
                return "--recompute-method block treats the first layers of a stage unlike the others"
        elif config.recompute_num_layers != 1:
            return "--recompute-num-layers above 1 joins layers"
    if getattr(config, "heterogeneous_block_specs", False):
        return "every layer is of a kind of its own"
    for block in _blocks(chunks):
        for kind, layers in _by_kind(config, block).items():
            if len({*map(_signature, layers)}) > 1:
                return f"layers of kind {kind!r} differ from each other"
            behind = layers[1:-1] if block.post_process else layers[1:]
            if len({*map(_changed_parts, behind)}) > 1:
                return f"features treat some layers of kind {kind!r} unlike the others"
    return ""


def counts(config: Any, chunks: Sequence[Any]) -> list[dict[str, int]]:
    """Return the number of layers of each kind that every chunk of a rank has."""
    found: list[dict[str, int]] = []
    for chunk in chunks:
        held: dict[str, int] = {}
        for block in _blocks([chunk]):
            for kind in _kinds_in(config, block):
                held[kind] = held.get(kind, 0) + 1
        found.append(held)
    return found


def variants(chunks: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
    """Return the layers of a rank to run: one of each kind in every chunk, then another one of each in turn.

    Chunks that differ in the layers they have keep all of them: how many run would not be one number.

    Args:
        chunks: layers of each kind that every chunk has.

    Returns:
        Layers of each kind in all chunks together; empty for all layers.
    """
    whole, *others = chunks
    if any(chunk != whole for chunk in others) or all(count <= 2 for count in whole.values()):
        return [{}]
    base = dict.fromkeys(whole, len(chunks))
    return [base, *({**base, kind: 2 * len(chunks)} for kind, count in whole.items() if count > 1)]


@contextmanager
def only_layers(config: Any, chunks: Sequence[Any], layers: Mapping[str, int]) -> Iterator[list[Any]]:
    """Run only some layers of each kind inside the context; yield the parameters of the others.

    All of them stay built, so that what a rank keeps is what it keeps. No number runs all layers; otherwise
    every chunk runs its share, the first layers of each kind.
    """
    import torch

    changed = []
    skipped: list[Any] = []
    try:
        for block in _blocks(chunks) if layers else ():
            left, kept = {kind: count // len(chunks) for kind, count in layers.items()}, []
            for kind, layer in zip(_kinds_in(config, block), block.layers):
                if left.get(kind, 0):
                    left[kind] -= 1
                    kept.append(layer)
                else:
                    skipped += list(layer.parameters())
            changed.append((block, block.layers, block.num_layers_per_pipeline_rank))
            block.layers = torch.nn.ModuleList(kept)
            block.num_layers_per_pipeline_rank = len(kept)
        yield skipped
    finally:
        for block, before, count in changed:
            block.layers, block.num_layers_per_pipeline_rank = before, count


def _blocks(chunks: Iterable[Any]) -> Iterator[Any]:
    from megatron.core.transformer.transformer_block import TransformerBlock

    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TransformerBlock):
                yield module


def _kinds_in(config: Any, block: Any) -> list[str]:
    kinds = layer_kinds(config)
    return [kinds[layer.layer_number - 1] for layer in block.layers]


def _recomputes_some(block: Any) -> bool:
    """Return whether ``--recompute-method block`` computes some layers of a block again, and others not."""
    return 0 < (block.config.recompute_num_layers or 0) < len(block.layers)


def _by_kind(config: Any, block: Any) -> dict[str, list[Any]]:
    """Return the layers of a block by kind, in order."""
    found: dict[str, list[Any]] = {}
    for kind, layer in zip(_kinds_in(config, block), block.layers):
        found.setdefault(kind, []).append(layer)
    return found


def _changed_parts(layer: Any) -> frozenset[tuple[object, ...]]:
    """Return what features changed in a layer: methods of its modules that are its own, and switches."""
    return frozenset(
        (name, attribute, value if isinstance(value, bool) else None)
        for name, module in layer.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, bool) or callable(value)
    )


def _signature(layer: Any) -> tuple[object, ...]:
    modules = tuple((name, type(module).__qualname__) for name, module in layer.named_modules())
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    return modules, shapes


def _routed(config: Any) -> list[bool]:
    if not getattr(config, "num_moe_experts", None):
        return [False] * config.num_layers
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(config.num_layers)]
    return [bool(one) for one in frequency]


def _windowed(config: Any) -> list[bool]:
    skip = getattr(config, "window_attn_skip_freq", None)
    if isinstance(skip, Sequence):
        return [bool(one) for one in skip]
    if skip:
        return [(layer + 1) % skip != 0 for layer in range(config.num_layers)]
    return [True] * config.num_layers
