"""Configuration, specification, chunks and data parallelism: interceptions and defaults."""

from __future__ import annotations

import copy
import inspect
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, _get_block_submodules
from megatron.core.utils import get_model_config

from mindspeed_core.errors import UserError
from mindspeed_core.feature import hookimpl
from mindspeed_core.run import DistInfo, Run
from mindspeed_megatron.built_model import settle_model
from mindspeed_megatron.chunk_places import place_of_chunk
from mindspeed_megatron.data_parallel import ddp_config_of
from mindspeed_megatron.expert_check import remember_placed
from mindspeed_megatron.hosts.megatron_lm import pretrain_call
from mindspeed_megatron.hosts.megatron_lm.flag_ownership import leave_to_features
from mindspeed_megatron.hosts.megatron_lm.pretrain_call import PretrainCall, arguments_of, intercepts
from mindspeed_megatron.hosts.megatron_lm.without_te import installed
from mindspeed_megatron.layers import build_mtp_spec, plain_parts
from mindspeed_megatron.script_tokenizer import script_tokenizer
from mindspeed_megatron.token_losses import pass_token_losses
from mindspeed_megatron.uneven_partition import build_for_any_partition, leaves_partition

if TYPE_CHECKING:
    from mindspeed_core.session import Session

__all__ = ["build_mtp_spec"]


@intercepts()
def around_config_from_args(
    now: PretrainCall, original: Callable[..., Any], args: Any, config_class: type | None = None
) -> Any:
    """Pass what ``core_transformer_config_from_args`` makes through its stage; scripts call it often."""
    if leaves_partition(now.session):
        original = _for_any_partition(original)
    base = original(args, config_class)
    for known_class, known_base, known in now.configs:
        if known_class is config_class and _same(known_base, base):
            # Training hangs its functions on the configuration of a model: each caller gets its own.
            return copy.copy(known)
    session = now.session
    with now.calling("build_transformer_config", lambda given: _fresh(original, given, args, base)):
        config = session.call("build_transformer_config", args=session.args)
    now.configs.append((config_class, copy.copy(base), copy.copy(config)))
    return config


def _same(one: Any, other: Any) -> bool:
    """Return whether two configurations say the same; each makes its own functions for initial weights."""
    return type(one) is type(other) and {name: _comparable(value) for name, value in vars(one).items()} == {
        name: _comparable(value) for name, value in vars(other).items()
    }


def _comparable(value: Any) -> Any:
    return (value.func, value.args, value.keywords) if isinstance(value, partial) else value


def _for_any_partition(original: Callable[..., Any]) -> Callable[..., Any]:
    def build(args: Any, config_class: type | None) -> Any:
        return build_for_any_partition(lambda values: original(Namespace(**values), config_class), vars(args))

    return build


def _fresh(original: Callable[..., Any], given: Any, args: Any, base: Any) -> Any:
    """Fill a configuration from the arguments Megatron-LM passed, or from a feature's own."""
    return copy.copy(base) if given is args else original(given, type(base))


@hookimpl(trylast=True)
def build_transformer_config(session: Session, args: Namespace) -> TransformerConfig:
    """Let Megatron-LM translate its arguments."""
    call = pretrain_call.current().call("build_transformer_config")
    if call is not None:
        built: TransformerConfig = call(args)
        return built
    return import_module("megatron.training.arguments").core_transformer_config_from_args(args)


def _around_init(*names: str) -> Callable[..., Any]:
    """Intercept the constructor of a model whose arguments of these names are specifications of layers."""

    @intercepts()
    def around(now: PretrainCall, original: Callable[..., Any], *args: Any, **named: Any) -> None:
        bound = arguments_of(original, args, named)
        given = bound.arguments
        _keep_outputs(now.session, given["config"])
        for name in names:
            given[name] = _layer_spec(now, given, name)
        if given.get("mtp_block_spec") is not None and given[names[0]].layer_specs:
            given["mtp_block_spec"] = now.session.call(
                "build_mtp_spec",
                args=now.session.args,
                config=given["config"],
                layer_spec=given[names[0]],
                vp_stage=given.get("vp_stage"),
            )
        original(*bound.args, **bound.kwargs)
        settle_model(now.session, [given["self"]], given["config"])

    return around


around_gpt_model = _around_init("transformer_layer_spec")
around_bert_model = _around_init("transformer_layer_spec")
around_t5_model = _around_init("transformer_encoder_layer_spec", "transformer_decoder_layer_spec")
around_mamba_model = _around_init("mamba_stack_spec")
"""``__init__`` of each model: its specification becomes a whole tree, which features change."""


def _keep_outputs(session: Session, config: TransformerConfig) -> None:
    """Leave outputs of interleaved stages alone while they are on their way.

    A device sends in the order of its stream, so that megatron-core may free what it has just handed over;
    gloo reads the memory of a send in flight.
    """
    if "cpu" in session.platform.kinds() and config.overlap_p2p_comm:
        config.deallocate_pipeline_outputs = False


def _layer_spec(now: PretrainCall, given: dict[str, Any], name: str) -> Any:
    session = now.session
    config = given["encoder_config"] if "encoder_layer" in name and "encoder_config" in given else None
    config = config or given["config"]
    vp_stage = given.get("vp_stage")
    with now.calling("build_layer_spec", lambda: _whole(given[name], config, vp_stage, given)):
        spec = session.call(
            "build_layer_spec",
            args=session.args,
            config=config,
            vp_stage=vp_stage,
            place=place_of_chunk(session, session.args, _groups(given), vp_stage),
        )
    remember_placed(session, spec)
    return spec


def _groups(given: Mapping[str, Any]) -> Any:
    """Return the process groups that a call was given, or megatron-core's."""
    return given.get("pg_collection") or ProcessGroupCollection.use_mpu_process_groups()


def _whole(spec: Any, config: Any, vp_stage: int | None, given: dict[str, Any]) -> Any:
    """Make the tree of a chunk of what the script made: a block, or one layer for all."""
    if not isinstance(spec, ModuleSpec) or hasattr(spec.submodules, "mamba_layer"):
        return spec
    options: dict[str, Any] = {}
    if "pp_rank" in inspect.signature(_get_block_submodules).parameters:
        options["pp_rank"] = _groups(given).pp.rank()
    return _get_block_submodules(config, spec, vp_stage, **options)


@hookimpl(trylast=True)
def build_layer_spec(args: Namespace, config: TransformerConfig) -> Any:
    """Return the script's layers; without TransformerEngine and Apex, with parts that also work sharded."""
    spec = pretrain_call.current().pending("build_layer_spec")()
    if (
        args.transformer_impl != "local"
        or installed(("apex",))
        or not isinstance(spec, TransformerBlockSubmodules)
    ):
        return spec
    return plain_parts(spec, config)


def provide(
    now: PretrainCall,
    provider: Callable[..., Any],
    args: tuple[Any, ...],
    named: dict[str, Any],
    config: Any = None,
) -> Any:
    """Build one chunk by the script's provider, from a configuration that features have changed.

    Args:
        now: the call of ``pretrain``.
        provider: of the script, or the method of a builder.
        args: what it was called with.
        named: likewise, by name.
        config: the configuration that a builder has; providers are handed theirs.

    Raises:
        UserError: the provider leaves the configuration it is given aside.
    """
    build = build_chunk if now.wants("build_model_chunk", "place_chunks") else _as_given
    if config is not None or not changes_config(now) or named.get("config") is not None:
        return build(now, provider, args, named, config)
    config = named["config"] = _config(now.session)
    chunk = build(now, provider, args, named, None)
    if get_model_config(chunk) is not config:
        names = now.features_in("build_transformer_config")
        raise UserError(
            f"{', '.join(names) or 'the partition of layers'}: changes the model's configuration, and the "
            "script's model_provider builds with another than the one in its argument config; drop its flag "
            "for this script"
        )
    return chunk


def _as_given(
    now: PretrainCall, provider: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any], config: Any
) -> Any:
    return provider(*args, **named)


def changes_config(now: PretrainCall) -> bool:
    """Return whether the stage changes the configuration that the script's provider is handed."""
    asked_for = now.wants("build_transformer_config") or leaves_partition(now.session)
    return "config" in now.handed and bool(asked_for)


def build_chunk(
    now: PretrainCall, provider: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any], config: Any
) -> Any:
    """Build one chunk through its stage, from the script's provider."""
    session = now.session
    bound = inspect.signature(provider).bind(*args, **named)
    bound.apply_defaults()
    given = bound.arguments
    pg = _groups(given)
    vp_stage = given.get("vp_stage")
    place = place_of_chunk(session, session.args, pg, vp_stage)

    def build(pre_process: bool, post_process: bool) -> Any:
        given.update(pre_process=pre_process, post_process=post_process)
        return provider(*bound.args, **bound.kwargs)

    with now.calling("build_model_chunk", build):
        return session.call(
            "build_model_chunk",
            args=session.args,
            config=config or given.get("config") or _config(session),
            layer_spec=None,
            pre_process=place.pre_process,
            post_process=place.post_process,
            vp_stage=vp_stage,
            global_stage=place.global_stage,
            pg=pg,
        )


@hookimpl(trylast=True)
def build_model_chunk(pre_process: bool, post_process: bool) -> MegatronModule:
    """Call the script's provider, which makes the specification itself: ``layer_spec`` is None here."""
    return pretrain_call.current().pending("build_model_chunk")(pre_process, post_process)


@intercepts()
def around_get_model(now: PretrainCall, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Intercept ``get_model``: the chunks of this rank, and their wrappers of data parallelism."""
    bound = arguments_of(original, args, named)
    bound.apply_defaults()
    hand_over = partial(bound.arguments.__setitem__, "model_provider_func")
    return _distribute(now, original, bound, hand_over)


def distribute(
    now: PretrainCall,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    named: dict[str, Any],
    hand_over: Callable[[Callable[..., Any]], None],
) -> Any:
    """Build and wrap the chunks of this rank by a builder's method, as `around_get_model` does by a function.

    Args:
        now: the call of ``pretrain``.
        original: the method.
        args: what it was called with.
        named: likewise, by name.
        hand_over: replaces what the method builds chunks with.
    """
    bound = arguments_of(original, args, named)
    bound.apply_defaults()
    return _distribute(now, original, bound, hand_over)


def _distribute(
    now: PretrainCall,
    original: Callable[..., Any],
    bound: inspect.BoundArguments,
    hand_over: Callable[[Callable[..., Any]], None],
) -> Any:
    model = _build(now, original, bound, hand_over)
    if bound.arguments["wrap_with_ddp"] is False and not now.has_run:
        begin_run(now, model, bound.arguments.get("pg_collection"))
    return model


def _build(
    now: PretrainCall,
    original: Callable[..., Any],
    bound: inspect.BoundArguments,
    hand_over: Callable[[Callable[..., Any]], None],
) -> Any:
    session, given = now.session, bound.arguments
    if not now.wants("build_model", "wrap_ddp"):
        return original(*bound.args, **bound.kwargs)
    wrapped = given["wrap_with_ddp"]
    config, pg = given.get("config") or _config(session), given.get("pg_collection")
    pg = pg or ProcessGroupCollection.use_mpu_process_groups()
    given["wrap_with_ddp"] = False
    with now.calling("build_model", lambda: original(*bound.args, **bound.kwargs)):
        model = session.call("build_model", args=session.args, config=config, pg=pg)
    if not wrapped:
        return model
    given["wrap_with_ddp"] = True

    def wrap(chunks: list[Any]) -> Any:
        # Megatron-LM wraps in the function that builds; what is built already is handed to it.
        ready = iter([chunk.module if isinstance(chunk, Float16Module) else chunk for chunk in chunks])
        hand_over(lambda *args, **named: next(ready))
        return original(*bound.args, **bound.kwargs)

    with now.calling("wrap_ddp", wrap):
        return session.call(
            "wrap_ddp",
            args=session.args,
            config=config,
            ddp_config=session.call("build_ddp_config", args=session.args),
            model=model,
            pg=pg,
        )


@hookimpl(trylast=True)
def build_model() -> list[MegatronModule]:
    """Build the chunks of this rank in Megatron-LM's loop."""
    return list(pretrain_call.current().pending("build_model")())


@hookimpl(trylast=True)
def wrap_ddp(model: list[MegatronModule]) -> list[MegatronModule]:
    """Wrap as Megatron-LM does: in DistributedDataParallel, or in one of the fully sharded ones."""
    return list(pretrain_call.current().pending("wrap_ddp")(model))


@intercepts()
def around_ddp(now: PretrainCall, original: Callable[..., Any], *args: Any, **named: Any) -> None:
    """Intercept ``DistributedDataParallel.__init__``: features change the options that are filled in."""
    bound = arguments_of(original, args, named)
    filled = bound.arguments["ddp_config"]
    with now.calling("build_ddp_config", lambda: copy.copy(filled)):
        bound.arguments["ddp_config"] = now.session.call("build_ddp_config", args=now.session.args)
    original(*bound.args, **bound.kwargs)


@hookimpl(trylast=True)
def build_ddp_config(args: Namespace) -> DistributedDataParallelConfig:
    """Return what Megatron-LM filled in; before it does, the same rule of names."""
    call = pretrain_call.current().call("build_ddp_config")
    if call is not None:
        return call()
    return ddp_config_of(args, average_in_collective=args.ddp_average_in_collective)


def _config(session: Session) -> Any:
    """Return the configuration of the model, as features change it."""
    now, args = pretrain_call.current(), session.args
    from_args = import_module("megatron.training.arguments").core_transformer_config_from_args
    if getattr(args, "yaml_cfg", None) is not None:
        from_yaml = import_module("megatron.training.yaml_arguments").core_transformer_config_from_yaml
        return around_config_from_args(lambda given, kind=None: from_yaml(given, "language_model"))(args)
    # Where the provider takes no configuration, the function itself is intercepted.
    return (around_config_from_args(from_args) if changes_config(now) else from_args)(args)


def begin_run(now: PretrainCall, model: Any, pg: Any = None) -> None:
    """Make the record of the run from its wrapped chunks; check that features have placed their modules."""
    session = now.session
    assert isinstance(now.dist, DistInfo)
    now.run = Run(
        session=session,
        args=session.args,
        config=get_model_config(model[0]),
        pg=pg or ProcessGroupCollection.use_mpu_process_groups(),
        dist=now.dist,
        model=model,
        tokenizer=script_tokenizer(),
    )
    leave_to_features(session, now.run)
    session.check_placements()
    pass_token_losses(now.run, model)
