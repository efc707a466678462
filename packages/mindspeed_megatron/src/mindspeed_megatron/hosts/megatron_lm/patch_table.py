"""The function of Megatron-LM behind each stage, how it is intercepted and why: a table of data.

A row is applied when an active feature implements one of its stages, or when the host itself needs it on the
platform in use. Where Megatron-LM offers an argument or hands out an object, no symbol is changed; the rows
with a target are patches, in the session's ledger. No torch is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from mindspeed_core.feature import Patch
from mindspeed_megatron.hosts.megatron_lm.without_te import TE_AND_APEX, installed

ARGUMENT, INSTANCE, GLOBAL, PATCH = "argument", "instance", "global", "patch"
ENTRY, STARTUP = "entry", "startup"

ALWAYS = ("cpu", "cuda", "npu")
"""Platforms of rows that every session needs."""
_EMULATED = ("cpu",)
_CUDA = ("cuda",)
_TRAINING = "megatron.training.training:"
_CHECKPOINTING = "megatron.training.checkpointing:"
_LOADS = ("load", "pretrained_checkpoint")
_GPT_MODEL = "megatron.core.models.gpt.gpt_model:GPTModel.__init__"
_SCHEDULE = "megatron.core.pipeline_parallel.schedules:get_forward_backward_func"
_HERE = "mindspeed_megatron.hosts.megatron_lm."


@dataclass(frozen=True)
class Interception:
    """One row.

    Attributes:
        stages: the stages it serves.
        target: the function, as ``package.module:name``, or the argument's name.
        reason: why it is this way.
        wrapper: ``module:function`` in this package that makes the intercepted function from the original.
        mechanism: `ARGUMENT` (of ``pretrain``), `INSTANCE` (an attribute of an object), `GLOBAL` (a name of
            the script), `PATCH`, `ENTRY` (a patch that is there from the import of the adaptor on) or
            `STARTUP` (one that is there from the call of ``pretrain`` until the session opens).
        kind: of the patch, see `Patch`.
        platforms: kinds of platforms on which the host itself needs it, whatever is active.
        elsewhere: the host itself needs it on platforms of none of these kinds.
        features: needed as soon as any feature is active.
        without_te: needed where neither TransformerEngine nor Apex is installed.
        versions: what differs in older versions of Megatron-LM.
        required: a version without the symbol is an error.
        loaded: needed only where the script has imported the module of the target.
        argument: name of an argument and a text that its value must contain, for rows of one option.
        unless: a stage whose own interception hands out the same; then this one is not needed.
        handed: an argument of the script's ``model_provider`` that makes this one unnecessary.
        models: the host itself needs it for models with all of these arguments set.
        any_of: the host itself needs it in runs with one of these arguments.
    """

    stages: tuple[str, ...]
    target: str
    reason: str
    wrapper: str = ""
    mechanism: str = PATCH
    kind: str = "wrap"
    platforms: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    features: bool = False
    without_te: bool = False
    versions: str = ""
    required: bool = True
    loaded: bool = False
    argument: tuple[str, str] = ("", "")
    unless: str = ""
    handed: str = ""
    models: tuple[str, ...] = ()
    any_of: tuple[str, ...] = ()

    def patch(self) -> Patch:
        """Return the patch of the row."""
        new = _HERE + self.wrapper
        return Patch(self.target, new, kind=self.kind, reason=self.reason, required=self.required)


def _row(target: str, wrapper: str, stages: str, reason: str, **facts: Any) -> Interception:
    return Interception(tuple(stages.split()), target, reason, wrapper, **facts)


def _entry(target: str, wrapper: str, stages: str, reason: str, **facts: Any) -> Interception:
    return _row(target, wrapper, stages, reason, mechanism=ENTRY, **facts)


def _by(mechanism: str, target: str, stages: str, reason: str, versions: str = "") -> Interception:
    return _row(target, "", stages, reason, mechanism=mechanism, versions=versions)


ENTRIES = (
    _entry(
        _TRAINING + "pretrain",
        "entry:around_pretrain",
        "finish_run",
        "a run begins and ends there; its arguments are the script's own functions",
    ),
    _entry(
        "megatron.training.arguments:parse_args",
        "entry:around_parse_args",
        "",
        "flags of features join the parser through its extra_args_provider, also where it is called before "
        "pretrain",
    ),
    _entry(
        "megatron.training.arguments:validate_args",
        "entry:around_validate_args",
        "validate_arguments_early validate_arguments",
        "the arguments are complete, those of a checkpoint included: the plan is made and the session opens",
    ),
)
"""In force from the import of the adaptor on."""

STARTUPS = (
    _row(
        "megatron.training.yaml_arguments:validate_yaml",
        "entry:around_validate_args",
        "validate_arguments_early validate_arguments",
        "takes the place of validate_args with --yaml-cfg",
        mechanism=STARTUP,
        required=False,
    ),
)
"""In force from the call of ``pretrain`` until the session opens, where the command line asks for them."""

_FROM_SCRIPT = "pretrain takes it from the script"
ARGUMENTS = (
    _by(ARGUMENT, "model_provider", "build_model_chunk place_chunks", _FROM_SCRIPT),
    _by(
        ARGUMENT,
        "model_provider",
        "seed_everything",
        "generators are seeded anew right before the model is built; on CPU for the host itself, since "
        "compiling has drawn from them",
    ),
    _by(
        ARGUMENT,
        "model_provider",
        "build_transformer_config",
        "the configuration is an argument of it",
        versions="a provider without the argument config has core_transformer_config_from_args intercepted",
    ),
    _by(
        GLOBAL,
        "core_transformer_config_from_args",
        "build_transformer_config",
        "the script makes a configuration for every micro-batch by this name",
    ),
    _by(ARGUMENT, "train_valid_test_datasets_provider", "build_datasets", _FROM_SCRIPT),
    _by(
        ARGUMENT,
        "forward_step_func",
        "forward_step compute_loss",
        f"{_FROM_SCRIPT}; the loss function is the second part of its result",
    ),
    _by(
        GLOBAL,
        "get_batch",
        "get_batch",
        "the script's forward step looks it up among the script's names",
        versions="0.15 and older return five values, without packed_seq_params",
    ),
    _by(
        GLOBAL,
        "get_batch_on_this_cp_rank",
        "get_batch",
        "the script splits sequences with it; who fills the slot context-parallel splits them itself",
    ),
    _by(
        GLOBAL,
        "is_first_or_last_pipeline_stage",
        "batch_fields place_chunks",
        "the script asks it which stages have samples",
    ),
    _by(
        GLOBAL,
        "get_batch_on_this_tp_rank",
        "batch_fields",
        "the script fetches samples with it; further fields are given to all tensor-parallel ranks",
    ),
    _by(INSTANCE, "optimizer.step", "optimizer_step", "of the object that build_optimizer returns"),
    _by(
        INSTANCE,
        "config.finalize_model_grads_func",
        "finalize_gradients",
        "the loop puts its function on the model's configuration, where the schedule looks it up",
    ),
)
"""Without any change of a symbol of Megatron-LM."""

PATCHES = (
    _row(
        "megatron.training.initialize:_initialize_distributed",
        "parallel:around_initialize_distributed",
        "init_distributed",
        "torch.distributed starts there",
    ),
    _row(
        "megatron.core.parallel_state:initialize_model_parallel",
        "parallel:around_initialize_model_parallel",
        "build_process_groups process_group_options",
        "ranks are compared before it, groups of features follow it",
        platforms=ALWAYS,
    ),
    _row(
        "megatron.training.global_vars:build_tokenizer",
        "tokenizer:around_build_tokenizer",
        "build_tokenizer",
        "the global tokenizer comes from there, and the model's vocabulary from it",
    ),
    _row(
        "megatron.training.arguments:core_transformer_config_from_args",
        "model:around_config_from_args",
        "build_transformer_config",
        "the script's model_provider takes no configuration",
        handed="config",
    ),
    _row(
        _GPT_MODEL,
        "model:around_gpt_model",
        "build_layer_spec build_mtp_spec",
        "the specification is an argument of the model, whoever builds it; copies of experts drift apart "
        "without a mark that it must have before it is wrapped",
        platforms=_EMULATED,
        without_te=True,
        models=("num_experts",),
    ),
    *(
        _row(_GPT_MODEL, "model:around_gpt_model", "", reason, **facts)
        for reason, facts in (
            ("losses of further predictions get their weight there", {"models": ("mtp_num_layers",)}),
            (
                "attention sinks lack a mark with which the gradient norm counts them",
                {"models": ("softmax_type",), "argument": ("softmax_type", "learnable")},
            ),
        )
    ),
    *(
        _row(
            f"megatron.core.models.{model}.__init__",
            f"model:{wrapper}",
            "build_layer_spec",
            f"the {arguments} of the model",
            required=False,
            loaded=True,
            models=("num_experts",),
        )
        for model, wrapper, arguments in (
            ("mamba.mamba_model:MambaModel", "around_mamba_model", "specification is an argument"),
            ("T5.t5_model:T5Model", "around_t5_model", "specifications are arguments"),
            ("bert.bert_model:BertModel", "around_bert_model", "specification is an argument"),
        )
    ),
    _row(
        _TRAINING + "get_model",
        "model:around_get_model",
        "build_model wrap_ddp",
        "the chunks of a rank come together there",
        versions="0.15 and older take neither config nor pg_collection",
    ),
    _row(
        _TRAINING + "get_model",
        "model:around_get_model",
        "",
        "with --skip-train no optimizer is built, where the run's record is made otherwise",
        features=True,
        argument=("skip_train", "True"),
    ),
    _row(
        "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
        "model:around_ddp",
        "build_ddp_config",
        "get_model fills the configuration and uses it in one function",
    ),
    _row(
        _TRAINING + "get_megatron_optimizer_config",
        "optimizer:around_optimizer_config",
        "build_optimizer_config",
        "it fills the configuration",
        versions="absent in 0.15 and older: there the configuration is changed where it is used",
        required=False,
    ),
    _row(
        "megatron.core.optimizer:get_megatron_optimizer",
        "optimizer:around_get_optimizer",
        "build_optimizer build_optimizer_config optimizer_step",
        "the optimizer comes from there, and the wrapped chunks go in: features that place modules are "
        "checked; torch's Adam needs care when it is saved and loaded",
        features=True,
        without_te=True,
    ),
    _row(
        "megatron.core.optimizer.muon:get_megatron_muon_optimizer",
        "optimizer:around_get_optimizer",
        "build_optimizer build_optimizer_config optimizer_step",
        "the optimizer comes from there with --optimizer muon",
        features=True,
        required=False,
        argument=("optimizer", "muon"),
    ),
    _row(
        _TRAINING + "get_optimizer_param_scheduler",
        "optimizer:around_get_scheduler",
        "build_scheduler",
        "the schedule comes from there",
    ),
    _row(
        _TRAINING + "get_optimizer_param_scheduler",
        "optimizer:around_get_scheduler",
        "start_run forward_step get_batch compute_loss finalize_gradients optimizer_step",
        "features see the schedule as run.scheduler; the step hands it out too",
        unless="train_step",
    ),
    _row(
        _CHECKPOINTING + "load_checkpoint",
        "checkpoint:around_load_checkpoint",
        "load_checkpoint after_load_checkpoint checkpoint_state restore_checkpoint_state model_state",
        "a run is loaded there, and its schedule from two places",
        any_of=_LOADS,
    ),
    _row(
        _CHECKPOINTING + "save_checkpoint",
        "checkpoint:around_save_checkpoint",
        "save_checkpoint before_save_checkpoint after_load_checkpoint",
        "a run is saved there",
    ),
    _row(
        _CHECKPOINTING + "generate_state_dict",
        "checkpoint:around_generate_state_dict",
        "checkpoint_state restore_checkpoint_state model_state",
        "what is saved and the template of what is loaded both come from it; the model is described there",
        any_of=("save",),
    ),
    _row(
        _CHECKPOINTING + "_load_base_checkpoint",
        "checkpoint:around_load_base_checkpoint",
        "load_checkpoint checkpoint_state restore_checkpoint_state",
        "what was loaded passes through it; its model is compared with the run's",
        any_of=_LOADS,
    ),
    _row(
        _TRAINING + "build_train_valid_test_data_iterators",
        "data:around_build_iterators",
        "build_data_iterators evaluate",
        "the iterators come from there",
    ),
    _row(
        _SCHEDULE,
        "step:around_get_schedule",
        "get_forward_backward boundary_schema forward_step get_batch compute_token_losses compute_loss "
        "reduce_losses",
        "training and evaluation ask it for the schedule; micro-batches are counted around it",
    ),
    _row(
        _SCHEDULE,
        "step:around_get_schedule",
        "start_run load_checkpoint",
        "before the first schedule everything is built and loaded",
        unless="train_step",
    ),
    *(
        _row(
            _SCHEDULE,
            "step:around_get_schedule",
            "",
            "losses of layers weigh by the tokens of a step, which are counted before it",
            models=(layers, "calculate_per_token_loss"),
        )
        for layers in ("num_experts", "mtp_num_layers")
    ),
    _row(
        _TRAINING + "train_step",
        "step:around_train_step",
        "train_step reduce_losses",
        "one step; before the first one everything is built and loaded",
        versions="0.15 and older take no iteration and return seven values",
    ),
    _row(
        _TRAINING + "training_log",
        "monitoring:around_training_log",
        "log_step",
        "the numbers of a step are printed and written there",
        versions="0.15 and older have decoupled_learning_rate as fourth argument",
    ),
    _row(
        _TRAINING + "evaluate",
        "monitoring:around_evaluate",
        "evaluate",
        "validation",
    ),
    _row(
        _TRAINING + "checkpoint_and_decide_exit",
        "monitoring:around_decide_exit",
        "should_stop",
        "the loop asks it whether to go on",
    ),
    _row(
        "megatron.legacy.fused_kernels:load",
        "emulation:no_kernels",
        "",
        "it compiles CUDA kernels",
        elsewhere=_CUDA,
        required=False,
    ),
    _row(
        "megatron.training.utils:get_device_arch_version",
        "emulation:old_enough",
        "",
        "it asks for a CUDA version that other devices do not have",
        elsewhere=(*_CUDA, *_EMULATED),
    ),
    _row(
        "torch.cuda:is_available",
        "emulation:says_available",
        "",
        "Megatron-LM trains only where it is",
        platforms=_EMULATED,
    ),
    *(
        _row(f"torch.cuda:{name}", f"emulation:{name}", "", reason, kind="replace", platforms=_EMULATED)
        for name, reason in (
            ("get_device_properties", "Megatron-LM asks which CUDA version the device has"),
            ("get_device_capability", "Megatron-LM asks which CUDA version the device has"),
            ("get_device_name", "Megatron-LM writes it down"),
        )
    ),
)
"""Applied when needed, taken back when the session closes."""


def needed(
    stages: Collection[str],
    kinds: Collection[str],
    args: Any,
    *,
    any_feature: bool,
    without_te: bool,
    handed: Collection[str] = ("config",),
) -> tuple[Interception, ...]:
    """Return the patches that one session needs, at most one per target, in the order of the table.

    Args:
        stages: what active features implement.
        kinds: of the platform in use, see ``Platform.kinds``.
        args: the arguments of the run, None for a listing.
        any_feature: some feature is active.
        without_te: neither TransformerEngine nor Apex is installed.
        handed: arguments that the script's ``model_provider`` takes.
    """
    found: dict[str, Interception] = {}
    for row in PATCHES:
        asked_for = (
            not set(stages).isdisjoint(row.stages)
            or not set(kinds).isdisjoint(row.platforms)
            or row.platforms == ALWAYS
            or (row.elsewhere and set(kinds).isdisjoint(row.elsewhere))
            or (row.features and any_feature)
            or (row.without_te and without_te)
            or (row.models and all(getattr(args, name, None) for name in row.models))
            or any(getattr(args, name, None) for name in row.any_of)
        )
        if asked_for and row.unless not in stages and row.handed not in handed and _applies(row, args):
            found.setdefault(row.target, row)
    return tuple(found.values())


def _applies(row: Interception, args: Any) -> bool:
    if row.loaded and row.target.partition(":")[0] not in sys.modules:
        return False
    name, text = row.argument
    return not name or text in str(getattr(args, name, ""))


def patches_for(stages: Collection[str], kinds: Collection[str]) -> tuple[Patch, ...]:
    """Return the patches of a training with features that implement these stages, for listings."""
    rows = needed(stages, kinds, None, any_feature=bool(stages), without_te=not installed(TE_AND_APEX))
    return tuple(row.patch() for row in (*ENTRIES, *rows))
