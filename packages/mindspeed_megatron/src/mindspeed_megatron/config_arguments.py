"""Configuration objects of megatron-core as arguments, and arguments back as fields.

A feature reads ``args.normalization``; a framework has a ``TransformerConfig`` of its own class. Here the
fields become the arguments they would have come from, and what features change of the arguments goes into a
copy of the configuration.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from mindspeed_core.flags.presets import DEFAULT, with_presets
from mindspeed_core.resolver.plan import Problem
from mindspeed_core.resolver.request import asking_flag
from mindspeed_megatron.config_flags import SPELLINGS, dest_of
from mindspeed_megatron.config_values import config_values
from mindspeed_megatron.flags import describing_flags

if TYPE_CHECKING:
    from mindspeed_core.flags.entries import ParsedArguments
    from mindspeed_core.flags.flag_set import FlagSet
    from mindspeed_core.registry import FeatureRecord

C = TypeVar("C")

DERIVED = frozenset({"params_dtype", "pipeline_dtype", "virtual_pipeline_model_parallel_size"})
"""Arguments without a flag of their own that features find in every host."""

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "fp8"}
_RENAMED = {
    "grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32",
    "check_for_nan_in_grad": "check_for_nan_in_loss_and_grad",
    "bucket_size": "ddp_bucket_size",
}
# Its default names TransformerEngine, whatever layers the caller builds.
_IGNORED = frozenset({"transformer_impl"})


def described(configs: Iterable[object]) -> dict[str, tuple[Any, str]]:
    """Return what configuration objects say, by argument.

    Of several objects with one field the one that differs from its class's default counts, and the last of
    those that do. Fields without a value, and functions, say nothing; of models see `unset`.

    Args:
        configs: dataclass instances; subclasses and their fields are fine.

    Returns:
        ``{dest: (value, "TransformerConfig.normalization")}``.

    Raises:
        TypeError: something is no configuration object.
    """
    found: dict[str, tuple[Any, str]] = {}
    for config in configs:
        if not is_dataclass(config) or isinstance(config, type):
            raise TypeError(f"configs: {config!r} is no configuration object; pass a list of dataclasses")
        kind = type(config).__name__
        for dest, name, value, set_by_caller in _read(config):
            if dest not in found or set_by_caller:
                found[dest] = (value, f"{kind}.{name}")
    return found


def unset(configs: Iterable[object]) -> dict[str, tuple[Any, str]]:
    """Return the arguments of fields without a value: a model whose number of experts is None has none.

    Configurations of models alone are read: a program may choose the learning rate of its optimizer later.

    Args:
        configs: dataclass instances, as in `described`.

    Returns:
        ``{dest: (default, "TransformerConfig.num_moe_experts")}`` with the default of the argument's flag.
    """
    defaults = _defaults()
    found: dict[str, tuple[Any, str]] = {}
    for config in configs:
        if not hasattr(config, "num_layers"):
            continue
        for field in fields(cast("Any", config)):
            dest = _RENAMED.get(field.name, dest_of(field.name))
            if dest in defaults and getattr(config, field.name, None) is None:
                found[dest] = (copy.copy(defaults[dest]), f"{type(config).__name__}.{field.name}")
    return found


def arguments_with_configs(
    parsed: ParsedArguments, flag_set: FlagSet, configs: Iterable[object], *, contradictions: bool
) -> ParsedArguments:
    """Fill in what configuration objects say where no flag does.

    Args:
        parsed: the arguments.
        flag_set: the flags that exist; those of features say what no configuration can.
        configs: dataclass instances, as in `described`.
        contradictions: a flag that says otherwise than the configurations is a problem.
    """
    args, provenance = Namespace(**vars(parsed.args)), dict(parsed.provenance)
    problems = list(parsed.problems)
    said = described(configs)
    without = {dest: default for dest, default in unset(configs).items() if dest not in said}
    of_features = {entry.flag.dest for entry in flag_set.entries if not entry.owner.startswith("host ")}
    for dest, (value, source) in (*said.items(), *without.items()):
        if dest in of_features:
            continue
        given = provenance.get(dest, DEFAULT)
        if given.startswith("flag ") and contradictions:
            if getattr(args, dest) != value:
                flag = given.removeprefix("flag ")
                same = "" if value is None else f", or give it {value!r}"
                problems.append(
                    Problem(
                        "E-CONFIG",
                        f"the flag says {getattr(args, dest)!r}, but {source} is {value!r}",
                        f"leave {flag} out{same}, or build the configuration as it says",
                        flag=flag,
                    )
                )
            continue
        if dest in said:
            setattr(args, dest, value)
            provenance[dest] = source
    problems += contradicted(flag_set.features, args, provenance, {**without, **said})
    return replace(parsed, args=args, provenance=provenance, problems=tuple(problems))


def with_arguments(config: C, args: Namespace, dests: Collection[str]) -> C:
    """Copy a configuration; the fields of the arguments named by ``dests`` get the arguments' values.

    The copy is of the same class and keeps attributes that are no fields. What the class derives from other
    fields when it is made is not derived again.
    """
    made = copy.copy(config)
    kind: Any = type(config)
    chosen = Namespace(**{name: value for name, value in vars(args).items() if name in dests})
    for name, value in config_values(kind, chosen).items():
        setattr(made, name, value)
    return made


def _read(config: Any) -> Iterator[tuple[str, str, Any, bool]]:
    """Yield argument, field, value, and whether somebody set it."""
    known = _dests()
    for field in fields(config):
        dest = _RENAMED.get(field.name, dest_of(field.name))
        value = _as_argument(field.name, getattr(config, field.name, None))
        if dest in known and field.name not in _IGNORED and value is not None:
            yield dest, field.name, value, value != _as_argument(field.name, _default(field))
    if hasattr(config, "gated_linear_unit"):
        yield from _read_activation(config)
    heads, groups = (getattr(config, name, None) for name in ("num_attention_heads", "num_query_groups"))
    if heads is not None and groups is not None:
        yield "group_query_attention", "num_query_groups", heads != groups, True
    if hasattr(config, "share_embeddings_and_output_weights"):
        name = "share_embeddings_and_output_weights"
        yield "untie_embeddings_and_output_weights", name, not getattr(config, name), True


def _read_activation(config: Any) -> Iterator[tuple[str, str, Any, bool]]:
    function = config.activation_func
    gated, name = config.gated_linear_unit, getattr(function, "__name__", "")
    yield "swiglu", "activation_func", gated and function is torch.nn.functional.silu, True
    yield "quick_geglu", "activation_func", gated and name == "quick_gelu", True
    yield "squared_relu", "activation_func", not gated and name == "squared_relu", True
    fused = bool(config.bias_activation_fusion)
    yield "bias_swiglu_fusion", "bias_activation_fusion", fused, True
    yield "bias_gelu_fusion", "bias_activation_fusion", fused, True


def _as_argument(name: str, value: Any) -> Any:
    """Return a field's value as the command line would have it; None where it says nothing."""
    if isinstance(value, torch.dtype):
        return value if name in DERIVED else _DTYPES.get(value)
    if name == "attention_backend":
        return getattr(value, "name", value)
    spelling = SPELLINGS.get(name)
    if spelling is not None and spelling.nargs == "+" and isinstance(value, (str, int, float)):
        return [value]
    return value if isinstance(value, (bool, int, float, str, list, tuple)) else None


def _default(field: Field[Any]) -> Any:
    return None if field.default is MISSING else field.default


@cache
def _defaults() -> Mapping[str, Any]:
    """Return the default of every describing flag, by argument; whoever hands one on copies it."""
    return {flag.dest: flag.default for flag in describing_flags()}


@cache
def _dests() -> frozenset[str]:
    return frozenset(_defaults()) | DERIVED


def contradicted(
    records: Iterable[FeatureRecord],
    args: Namespace,
    provenance: Mapping[str, str],
    said: Mapping[str, tuple[Any, str]],
) -> list[Problem]:
    """Return the problems of presets that a program's own configurations contradict.

    The program builds its model from the configurations: what a preset says would have no effect.

    Args:
        records: features that may have presets.
        args: the arguments, with what the configurations say.
        provenance: where each of them came from.
        said: by argument what the configurations say, and the name of the field.
    """
    problems = []
    for feature in (record.cls for record in with_presets(records, args)):
        try:
            preset = dict(feature.presets(args))
        except (Exception, SystemExit):
            # What fails was reported, or left out, when the flags were read.
            continue
        flag = asking_flag(feature, args, provenance)
        # In the preset's order, which is the same on every rank.
        for dest in (dest for dest in preset if dest in said):
            value, source = said[dest]
            if value != preset[dest] and not provenance.get(dest, DEFAULT).startswith("flag "):
                wrong = f"it sets {dest} to {preset[dest]!r}, but {source} is {value!r}"
                remedy = f"build the configuration as it says, or leave {flag or 'the feature'} out"
                problems.append(Problem("E-CONFIG", wrong, remedy, feature.name, flag))
    return problems
