"""The model of a checkpoint, as a record in it.

It holds every field of the model's configuration, what the model class and the training got beside it, and
what active features say of the model, as JSON types. `model_comparison` compares two of them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_core.errors import CheckpointError
from mindspeed_megatron.config_flags import dest_of
from mindspeed_megatron.layer_patterns import spelled_out
from mindspeed_megatron.unwrap import unwrap
from mindspeed_megatron.vocabulary import Vocabulary

if TYPE_CHECKING:
    from mindspeed_core.run import Run
    from mindspeed_core.session import Session

KEY = "mindspeed_model"
"""Key of the record among the state of features, where every host keeps it."""
FORMAT = 1
_PARTS = ("config", "arguments", "facts")

_OF_ARGUMENTS = (
    "position_embedding_type rotary_base rotary_percent rotary_seq_len_interpolation_factor use_rope_scaling "
    "rope_scaling_factor fp16_lm_cross_entropy max_position_embeddings vocab_size padded_vocab_size "
    "make_vocab_size_divisible_by seq_length seed split clip_grad lr_warmup_init lr_wsd_decay_style "
    "lr_wsd_decay_iters lr_wsd_decay_samples reset_position_ids reset_attention_mask eod_mask_loss"
).split()
"""Arguments that no field of the configuration holds."""
_OF_CHUNKS = {
    "position_embedding_type": "position_embedding_type",
    "rotary_base": "rotary_base",
    "rotary_percent": "rotary_percent",
    "rotary_scaling": "use_rope_scaling",
    "fp16_lm_cross_entropy": "fp16_lm_cross_entropy",
    "max_sequence_length": "max_position_embeddings",
    "share_embeddings_and_output_weights": "share_embeddings_and_output_weights",
}
"""Attributes of megatron-core's language models that say the same, by attribute."""
_FILLED = ("ffn_hidden_size", "kv_channels", "num_query_groups", "moe_ffn_hidden_size")
"""Fields that megatron-core fills where they are None; an argument without value says nothing of them."""
_LISTED = ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
_SINGLE_FREQUENCIES = 4
_PLAIN = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class ModelRecord:
    """A model as a checkpoint describes it.

    Attributes:
        config: every field of its configuration, by name.
        arguments: what the model class, the data and the steps got beside it; a name that is missing is not
            known.
        facts: what active features say of it; a name that is missing is off.
        complete: whether ``config`` has every field that its megatron-core knew; records of checkpoints that
            have none are put together from what else is there.
        defaults: defaults of the fields, for a record of this process; not saved.
    """

    config: Mapping[str, Any]
    arguments: Mapping[str, Any]
    facts: Mapping[str, Any] = field(default_factory=dict)
    complete: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {
            "format": FORMAT,
            "config": dict(self.config),
            "arguments": dict(self.arguments),
            "facts": dict(self.facts),
        }

    @property
    def fields(self) -> dict[str, Any]:
        """Return configuration and arguments together."""
        return {**self.arguments, **self.config}


def describe_model(
    config: Any, session: Session, *, args: Namespace | None, chunks: Sequence[Any] = ()
) -> ModelRecord:
    """Describe the model of a run.

    Args:
        config: its configuration, as features changed it.
        session: the session, whose active features say what they change.
        args: the arguments it was built from; None where the chunks are the caller's own.
        chunks: the built chunks of this rank.
    """
    values = {one.name: _plain(one.name, getattr(config, one.name, None)) for one in _named(config)}
    _simplify(values)
    arguments = {} if args is None else _arguments(vars(args))
    arguments |= _of_built(chunks, everything=args is None)
    arguments = {name: value for name, value in arguments.items() if name not in values}
    if "padded_vocab_size" in arguments:
        arguments["softmax_vocab_size"] = session.state(Vocabulary).kept or arguments["padded_vocab_size"]
    facts: dict[str, Any] = {}
    for fact, value in feature_facts(session, session.args if args is None else args).items():
        # What a feature puts in the place of a field is that field.
        (values if fact in values else facts)[fact] = _plain(fact, value)
    return ModelRecord(values, arguments, facts, defaults=_defaults(config))


def feature_facts(session: Session, args: Namespace) -> dict[str, Any]:
    """Return what active features say that they change of a model built from arguments."""
    found: dict[str, Any] = {}
    for name in session.plan.names:
        found.update(session.registry.features[name].cls.model_facts(args))
    return found


@dataclass
class _Described:
    """The record of a session's model, and what it was made from."""

    config: Any = None
    args: Any = None
    kept: int | None = None
    record: ModelRecord | None = None


def describe_run(run: Run, *, built_by_caller: bool = False) -> ModelRecord:
    """Describe the model of a run, once: nothing of it changes while it trains.

    Args:
        run: the run, with its model.
        built_by_caller: the arguments do not say how the model was built.
    """
    known, kept = run.session.state(_Described), run.session.state(Vocabulary).kept
    same = known.config is run.config and known.args is run.args and known.kept == kept
    if known.record is None or not same:
        args = None if built_by_caller else run.args
        known.record = describe_model(run.config, run.session, args=args, chunks=run.model)
        known.config, known.args, known.kept = run.config, run.args, kept
    return known.record


def softmax_size(record: ModelRecord) -> int | None:
    """Return how many ids of a model took part in its softmax; None where the record does not say."""
    size = record.arguments.get("softmax_vocab_size") or record.arguments.get("padded_vocab_size")
    return size if isinstance(size, int) else None


def read_record(value: Any, where: str) -> ModelRecord | None:
    """Return the record that `ModelRecord.as_dict` made; None where there is none.

    Raises:
        CheckpointError: it is damaged, or of a later version.
    """
    if value is None:
        return None
    parts: list[Any] = [value.get(name) for name in _PARTS] if isinstance(value, dict) else []
    if not parts or not all(isinstance(part, dict) and _is_plain(part) for part in parts):
        raise CheckpointError(f"{where}: the record of the model is damaged; load another checkpoint")
    if value.get("format") != FORMAT:
        raise CheckpointError(
            f"{where}: the record of the model has format {value.get('format')!r}, and this version of "
            f"mindspeed-core reads {FORMAT}; use the version that wrote the checkpoint"
        )
    return ModelRecord(**dict(zip(_PARTS, parts)))


def from_arguments(given: Mapping[str, Any], now: ModelRecord) -> ModelRecord:
    """Put a record together from the arguments that a checkpoint without one holds, as far as they go.

    Args:
        given: by Megatron-LM's name of the argument.
        now: the record of this run, for the names and defaults of fields.
    """
    config: dict[str, Any] = {}
    for name in now.config:
        dest = dest_of(name)
        if dest not in given or (given[dest] is None and name in _FILLED):
            continue
        value = now.defaults.get(name) if given[dest] is None else _plain(name, given[dest])
        config[name] = value
    if given.get("group_query_attention") is False and "num_attention_heads" in config:
        config["num_query_groups"] = config["num_attention_heads"]
    config |= {name: value for name, value in _activation(given).items() if name in now.config}
    _simplify(config)
    arguments = {name: value for name, value in _arguments(given).items() if name in now.arguments}
    return ModelRecord(config, arguments, complete=False)


def _named(config: Any) -> list[Field[Any]]:
    return [one for one in fields(config) if not one.name.startswith("_")]


def _defaults(config: Any) -> dict[str, Any]:
    """Return the defaults of the fields; of those that megatron-core fills, what it filled in."""
    values: dict[str, Any] = {}
    for one in _named(config):
        if one.default is not MISSING:
            values[one.name] = _plain(one.name, one.default)
        elif one.default_factory is not MISSING:
            values[one.name] = _plain(one.name, one.default_factory())
    return values


def _arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    known = {name: _plain(name, given[name]) for name in _OF_ARGUMENTS if name in given}
    if "untie_embeddings_and_output_weights" in given:
        known["share_embeddings_and_output_weights"] = not given["untie_embeddings_and_output_weights"]
    return known


def _activation(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that the flags of activations stand for, by Megatron-LM's rules."""
    flags = [given.get(name) for name in ("swiglu", "quick_geglu", "squared_relu")]
    swiglu, quick, squared = flags
    gated = {"gated_linear_unit": bool(swiglu or quick)} if None not in (swiglu, quick) or swiglu else {}
    if swiglu:
        return {**gated, "activation_func": "silu"}
    if quick:
        return {**gated, "activation_func": "quick_gelu"}
    if squared:
        return {**gated, "activation_func": "squared_relu"}
    others = any(given.get(name) for name in ("openai_gelu", "onnx_safe"))
    return {} if None in flags or others else {**gated, "activation_func": "gelu"}


def _of_built(chunks: Sequence[Any], *, everything: bool) -> dict[str, Any]:
    """Return what built chunks say: the frequencies of rotary positions, or everything they were given."""
    found: dict[str, Any] = {}
    for chunk in chunks:
        bare = unwrap(chunk)
        if everything:
            found |= {
                name: _plain(name, getattr(bare, attribute))
                for attribute, name in _OF_CHUNKS.items()
                if hasattr(bare, attribute)
            }
            vocabulary = getattr(bare, "vocab_size", None)
            if isinstance(vocabulary, int):
                found["padded_vocab_size"] = vocabulary
        frequencies = getattr(getattr(bare, "rotary_pos_emb", None), "inv_freq", None)
        if isinstance(frequencies, torch.Tensor) and frequencies.numel() and not frequencies.is_meta:
            found["rotary_frequencies"] = _summary(frequencies)
    return found


def _summary(frequencies: torch.Tensor) -> list[float]:
    """Return the number of frequencies and some of them."""
    flat = frequencies.detach().float().cpu().reshape(-1)
    places = torch.linspace(0, len(flat) - 1, _SINGLE_FREQUENCIES).round().long().tolist()
    return [len(flat), *(float(flat[place]) for place in places)]


def _simplify(values: dict[str, Any]) -> None:
    """Write patterns of layers out, and leave out what follows from other fields: one spelling of a model."""
    values |= spelled_out(values)
    heads, width = values.get("num_attention_heads"), values.get("hidden_size")
    if heads and values.get("num_query_groups") == heads:
        values["num_query_groups"] = None
    if heads and width and values.get("kv_channels") == width // heads:
        values["kv_channels"] = None


def _plain(name: str, value: Any) -> Any:
    """Return a value in JSON types."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        items = [_plain(name, item) for item in value]
        return items[0] if name in _LISTED and len(items) == 1 else items
    if isinstance(value, Mapping):
        return {str(key): _plain(name, item) for key, item in value.items()}
    if isinstance(value, torch.dtype):
        return str(value)
    said = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    return str(said or type(value).__qualname__)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
