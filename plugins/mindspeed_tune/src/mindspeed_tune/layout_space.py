"""The layouts of a model on a number of ranks: sizes that divide, and what goes with each of them.

Nothing here decides what is valid: `mindspeed_core.check` does. Sizes that cannot divide are left out
beforehand, since asking for each of them would take longer than all that follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd
from typing import Any

from mindspeed_core.errors import UserError
from mindspeed_core.registry import Registry
from mindspeed_tune.candidate import (
    CHUNKS,
    CONTEXT,
    EXPERT,
    EXPERT_TENSOR,
    GRADIENT_OVERLAP,
    LAYERS_PER_CHUNK,
    MICRO_BATCH,
    PARAMETER_OVERLAP,
    PIPELINE,
    RECOMPUTE,
    RECOMPUTE_LAYERS,
    RECOMPUTE_METHOD,
    SEQUENCE,
    TENSOR,
    ZERO,
    Candidate,
)
from mindspeed_tune.space_file import Space

ALGORITHM, INNER = "--context-parallel-algo", "--ulysses-degree-in-cp"
_MICRO_BATCHES = (1, 2, 4, 8)
SIZES = (
    TENSOR,
    PIPELINE,
    CONTEXT,
    ALGORITHM,
    INNER,
    EXPERT,
    EXPERT_TENSOR,
    SEQUENCE,
    MICRO_BATCH,
    LAYERS_PER_CHUNK,
    ZERO,
    GRADIENT_OVERLAP,
    PARAMETER_OVERLAP,
    RECOMPUTE,
)
"""Flags whose values depend on each other; any other flag of a space file is multiplied with all layouts."""
FULL_RECOMPUTE = {RECOMPUTE: "full", RECOMPUTE_METHOD: "uniform", RECOMPUTE_LAYERS: 1}
_NO_RECOMPUTE: dict[str, Any] = {
    RECOMPUTE: None,
    RECOMPUTE_METHOD: None,
    RECOMPUTE_LAYERS: None,
    "--recompute-activations": None,
}


@dataclass(frozen=True)
class Model:
    """Sizes of a training that decide which layouts there are.

    Attributes:
        layers: of the model.
        heads: of attention.
        key_heads: of keys and values.
        experts: of a layer; 0 without.
        sequence: tokens of a sample.
        batch: samples of a step.
        context_parallel: some installed feature splits sequences.
    """

    layers: int
    heads: int
    key_heads: int
    experts: int
    sequence: int
    batch: int
    context_parallel: bool

    @classmethod
    def of(cls, args: Any, registry: Registry) -> Model:
        """Return the sizes of parsed arguments.

        Raises:
            UserError: one that every layout depends on is missing.
        """
        needed = ("num_layers", "num_attention_heads", "seq_length", "global_batch_size")
        for name in needed:
            if not getattr(args, name, None):
                flag = "--" + name.replace("_", "-")
                raise UserError(f"{flag}: a search needs it to know which layouts there are; add it")
        grouped = getattr(args, "group_query_attention", False)
        return cls(
            layers=args.num_layers,
            heads=args.num_attention_heads,
            key_heads=args.num_query_groups if grouped else args.num_attention_heads,
            experts=getattr(args, "num_experts", None) or 0,
            sequence=args.seq_length,
            batch=args.global_batch_size,
            context_parallel=any(CONTEXT in record.cls.tuning for record in registry.features.values()),
        )


def layouts(
    model: Model, given: Any, world_size: int, per_node: int, space: Space, registry: Registry
) -> Iterator[Candidate]:
    """Yield every layout whose sizes divide, each with all that the space adds to it.

    Args:
        model: its sizes.
        given: the parsed arguments of the user's command: what it says stays a candidate.
        world_size: ranks.
        per_node: ranks of a node, within which tensor parallelism stays.
        space: what the user wants tried.
        registry: whose features' facts say which algorithms of context parallelism there are.
    """
    further = [
        [{flag: value} for value in values] for flag, values in space.flags.items() if flag not in SIZES
    ]
    for settings in _layouts(model, given, world_size, per_node, space, registry):
        for added in product(*further):
            yield Candidate(dict(item for part in (settings, *added) for item in part.items()))


def _layouts(
    model: Model, given: Any, world: int, per_node: int, space: Space, registry: Registry
) -> Iterator[dict[str, Any]]:
    most = min(space.limits["tensor_parallel"] or per_node, world)
    tensor = [
        size
        for size in _divisors(gcd(model.heads, world))
        if size <= most and (model.key_heads % size == 0 or size % model.key_heads == 0)
    ]
    for tp in _chosen(space, TENSOR, tensor):
        for context in _context(model, world // tp if world % tp == 0 else 0, space, registry):
            cp = context[CONTEXT]
            if world % (tp * cp):
                continue
            stages = _divisors(gcd(model.layers, world // (tp * cp)))
            for pp in _chosen(space, PIPELINE, stages):
                if world % (tp * cp * pp):
                    continue
                yield from _within(model, given, space, world, tp, pp, context)


def _within(
    model: Model, given: Any, space: Space, world: int, tp: int, pp: int, context: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    dp = world // (tp * pp * context[CONTEXT])
    if model.batch % dp:
        return
    sequence = _chosen(space, SEQUENCE, [tp > 1])
    parts = (
        [{TENSOR: tp, PIPELINE: pp, **context}],
        [{SEQUENCE: value} for value in sequence],
        _experts(model, space, world // pp, tp),
        [{MICRO_BATCH: size} for size in _micro_batches(model, space, given, dp)],
        _chunks(model, space, pp),
        _recompute(space, given),
        _data_parallel(space, given, dp * context[CONTEXT]),
    )
    for chosen in product(*parts):
        yield dict(item for part in chosen for item in part.items())


def _context(model: Model, rest: int, space: Space, registry: Registry) -> Iterator[dict[str, Any]]:
    facts = _facts(registry)
    least = space.limits["context_tokens"]
    sizes = [1]
    if model.context_parallel:
        sizes += [
            size
            for size in facts.get(CONTEXT, ())
            if size > 1 and rest % size == 0 and model.sequence // size >= least
        ]
    for cp in _chosen(space, CONTEXT, sizes):
        if cp == 1:
            yield {CONTEXT: 1}
            continue
        for algorithm in _chosen(space, ALGORITHM, facts.get(ALGORITHM, ())) or [None]:
            inner = [None]
            if algorithm is not None and "hybrid" in str(algorithm):
                values = _chosen(space, INNER, facts.get(INNER, ()))
                inner = [size for size in values if size < cp and cp % size == 0]
            for degree in inner:
                yield {CONTEXT: cp, ALGORITHM: algorithm, INNER: degree}


def _experts(model: Model, space: Space, ranks: int, tp: int) -> list[dict[str, Any]]:
    if not model.experts:
        return [{}]
    found = []
    for ep in _chosen(space, EXPERT, _divisors(gcd(model.experts, ranks))):
        for etp in _chosen(space, EXPERT_TENSOR, sorted({1, tp})):
            if ranks % (ep * etp) == 0:
                found.append({EXPERT: ep, EXPERT_TENSOR: etp})
    return found


def _micro_batches(model: Model, space: Space, given: Any, dp: int) -> list[int]:
    own = getattr(given, "micro_batch_size", None)
    wanted = sorted({*_MICRO_BATCHES, *([own] if own else [])})
    return [size for size in _chosen(space, MICRO_BATCH, wanted) if model.batch // dp % size == 0]


def _chunks(model: Model, space: Space, pp: int) -> list[dict[str, Any]]:
    per_stage = model.layers // pp
    plain = {LAYERS_PER_CHUNK: None, CHUNKS: None}
    if pp == 1 or model.layers % pp:
        return [plain]
    layers = [per_stage // chunks for chunks in _divisors(per_stage) if 1 < chunks <= space.limits["chunks"]]
    chosen = _chosen(space, LAYERS_PER_CHUNK, [None, *layers])
    return [{LAYERS_PER_CHUNK: value or None, CHUNKS: None} for value in chosen]


def _recompute(space: Space, given: Any) -> list[dict[str, Any]]:
    named = {None: _NO_RECOMPUTE, False: _NO_RECOMPUTE, "full": FULL_RECOMPUTE}
    if RECOMPUTE in space.flags:
        return [{**_NO_RECOMPUTE, **named.get(value, {RECOMPUTE: value})} for value in space.flags[RECOMPUTE]]
    found: list[dict[str, Any]] = [dict(_NO_RECOMPUTE), {**_NO_RECOMPUTE, **FULL_RECOMPUTE}]
    own = getattr(given, "recompute_granularity", None)
    if own and (own, getattr(given, "recompute_method", None)) != ("full", "uniform"):
        # The user's own way stays as it is written.
        found.append({})
    return found


def _data_parallel(space: Space, given: Any, shards: int) -> list[dict[str, Any]]:
    own_zero = bool(getattr(given, "use_distributed_optimizer", False))
    own_overlap = bool(getattr(given, "overlap_grad_reduce", False))
    own_gather = bool(getattr(given, "overlap_param_gather", False))
    zeros = _chosen(space, ZERO, [own_zero] if shards == 1 else sorted({own_zero, True}))
    found = []
    for zero in zeros:
        overlaps = [(False, False)] if shards == 1 else [(False, False), (True, zero)]
        if shards > 1 and (own_overlap, own_gather) not in overlaps:
            overlaps.append((own_overlap, own_gather))
        for reduce, gather in overlaps:
            if GRADIENT_OVERLAP in space.flags and reduce not in space.flags[GRADIENT_OVERLAP]:
                continue
            if PARAMETER_OVERLAP in space.flags and gather not in space.flags[PARAMETER_OVERLAP]:
                continue
            found.append({ZERO: zero, GRADIENT_OVERLAP: reduce, PARAMETER_OVERLAP: gather and zero})
    return found


def _chosen(space: Space, flag: str, values: Sequence[Any]) -> list[Any]:
    """Return the values to try of a flag: those of the space file where it names the flag."""
    return list(space.flags.get(flag, values))


def _facts(registry: Registry) -> dict[str, Sequence[Any]]:
    """Return the values worth trying of every flag, by the facts of installed features."""
    return {
        flag: values for record in registry.features.values() for flag, values in record.cls.tuning.items()
    }


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
