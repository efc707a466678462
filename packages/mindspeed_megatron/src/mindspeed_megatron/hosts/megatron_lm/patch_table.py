"""The function of Megatron-LM behind each stage, how it is intercepted and why: a table of data.

A row is applied when an active feature implements one of its stages, or when the host itself needs it on the
platform in use. Where Megatron-LM offers an argument or hands out an object, no symbol is changed; the rows
with a target are patches, in the session's ledger. No torch is imported here.
"""

from __future__ import annotations

from mindspeed_megatron.hosts.megatron_lm.interception import (
    ALWAYS,
    ARGUMENT,
    GLOBAL,
    INSTANCE,
    STARTUP,
    by,
    entry,
    intercepted,
)

_EMULATED = ("cpu",)
_CUDA = ("cuda",)
_TRAINING = "megatron.training.training:"
_CHECKPOINTING = "megatron.training.checkpointing:"
_LOADS = ("load", "pretrained_checkpoint")
_GPT_MODEL = "megatron.core.models.gpt.gpt_model:GPTModel.__init__"
_SCHEDULE = "megatron.core.pipeline_parallel.schedules:get_forward_backward_func"


ENTRIES = (
    entry(
        _TRAINING + "pretrain",
        "entry:around_pretrain",
        "finish_run",
        "a run begins and ends there; its arguments are the script's own functions",
    ),
    entry(
        "megatron.training.arguments:parse_args",
        "entry:around_parse_args",
        "",
        "flags of features join the parser through its extra_args_provider, also where it is called before "
        "pretrain",
    ),
    entry(
        "megatron.training.arguments:validate_args",
        "entry:around_validate_args",
        "validate_arguments_early validate_arguments",
        "the arguments are complete, those of a checkpoint included: the plan is made and the session opens",
        versions="scripts of 0.18 and later read and validate arguments before they call pretrain",
    ),
)
"""In force from the import of the adaptor on."""

STARTUPS = (
    intercepted(
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
    by(ARGUMENT, "model_provider", "build_model_chunk place_chunks", _FROM_SCRIPT),
    by(
        ARGUMENT,
        "model_provider",
        "seed_everything",
        "generators are seeded anew right before the model is built; on CPU for the host itself, since "
        "compiling has drawn from them",
    ),
    by(
        ARGUMENT,
        "model_provider",
        "build_transformer_config",
        "the configuration is an argument of it",
        versions="a provider without the argument config has core_transformer_config_from_args intercepted",
    ),
    by(
        GLOBAL,
        "core_transformer_config_from_args",
        "build_transformer_config",
        "the script makes a configuration for every micro-batch by this name",
    ),
    by(ARGUMENT, "train_valid_test_datasets_provider", "build_datasets", _FROM_SCRIPT),
    by(
        ARGUMENT,
        "forward_step_func",
        "forward_step compute_loss",
        f"{_FROM_SCRIPT}; the loss function is the second part of its result",
    ),
    by(
        GLOBAL,
        "get_batch",
        "get_batch",
        "the script's forward step looks it up among the script's names",
        versions="0.15 and older return five values, without packed_seq_params; 0.18 and later return ten, "
        "and packed_seq_params of a feature reaches the model beside the script",
    ),
    by(
        GLOBAL,
        "get_batch_on_this_cp_rank",
        "get_batch",
        "the script splits sequences with it; who fills the slot context-parallel splits them itself",
    ),
    by(
        GLOBAL,
        "is_first_or_last_pipeline_stage",
        "batch_fields place_chunks",
        "the script asks it which stages have samples",
    ),
    by(
        GLOBAL,
        "get_batch_on_this_tp_rank",
        "batch_fields",
        "the script fetches samples with it; further fields are given to all tensor-parallel ranks",
        versions="0.18 and later hand it the sample, which the script has read",
    ),
    by(
        INSTANCE,
        "cfg_container.model.get_builder_cls",
        "build_model_chunk place_chunks seed_everything build_model wrap_ddp",
        "the settings that pretrain is given name the builder of the model",
        versions="0.19 and later, in place of model_provider and get_model",
    ),
    by(INSTANCE, "optimizer.step", "optimizer_step", "of the object that build_optimizer returns"),
    by(
        INSTANCE,
        "config.finalize_model_grads_func",
        "finalize_gradients",
        "the loop puts its function on the model's configuration, where the schedule looks it up",
    ),
)
"""Without any change of a symbol of Megatron-LM."""

PATCHES = (
    intercepted(
        "megatron.training.initialize:_initialize_distributed",
        "parallel:around_initialize_distributed",
        "init_distributed",
        "torch.distributed starts there",
    ),
    intercepted(
        "megatron.core.parallel_state:initialize_model_parallel",
        "parallel:around_initialize_model_parallel",
        "build_process_groups process_group_options",
        "ranks are compared before it, groups of features follow it",
        platforms=ALWAYS,
    ),
    intercepted(
        "megatron.training.global_vars:build_tokenizer",
        "tokenizer:around_build_tokenizer",
        "build_tokenizer",
        "the global tokenizer comes from there, and the model's vocabulary from it",
    ),
    intercepted(
        "megatron.training.arguments:core_transformer_config_from_args",
        "model:around_config_from_args",
        "build_transformer_config",
        "the script's model_provider takes no configuration",
        versions="0.18 and later make the configuration before pretrain is called",
        handed="config",
    ),
    intercepted(
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
        intercepted(_GPT_MODEL, "model:around_gpt_model", "", reason, **facts)
        for reason, facts in (
            ("losses of further predictions get their weight there", {"models": ("mtp_num_layers",)}),
            (
                "attention sinks lack a mark with which the gradient norm counts them",
                {"models": ("softmax_type",), "argument": ("softmax_type", "learnable")},
            ),
        )
    ),
    *(
        intercepted(
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
    intercepted(
        _TRAINING + "get_model",
        "model:around_get_model",
        "build_model wrap_ddp",
        "the chunks of a rank come together there",
        versions="0.15 and older take neither config nor pg_collection",
    ),
    intercepted(
        _TRAINING + "get_model",
        "model:around_get_model",
        "",
        "with --skip-train no optimizer is built, where the run's record is made otherwise",
        features=True,
        argument=("skip_train", "True"),
    ),
    intercepted(
        "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
        "model:around_ddp",
        "build_ddp_config",
        "get_model fills the configuration and uses it in one function",
    ),
    intercepted(
        _TRAINING + "get_megatron_optimizer_config",
        "optimizer:around_optimizer_config",
        "build_optimizer_config",
        "it fills the configuration",
        versions="absent in 0.15 and older: there the configuration is changed where it is used",
        required=False,
    ),
    intercepted(
        "megatron.core.optimizer:get_megatron_optimizer",
        "optimizer:around_get_optimizer",
        "build_optimizer build_optimizer_config optimizer_step",
        "the optimizer comes from there, and the wrapped chunks go in: features that place modules are "
        "checked; torch's Adam needs care when it is saved and loaded",
        features=True,
        without_te=True,
    ),
    intercepted(
        "megatron.core.optimizer.muon:get_megatron_muon_optimizer",
        "optimizer:around_get_optimizer",
        "build_optimizer build_optimizer_config optimizer_step",
        "the optimizer comes from there with --optimizer muon",
        features=True,
        required=False,
        argument=("optimizer", "muon"),
    ),
    intercepted(
        _TRAINING + "get_optimizer_param_scheduler",
        "optimizer:around_get_scheduler",
        "build_scheduler",
        "the schedule comes from there",
    ),
    intercepted(
        _TRAINING + "get_optimizer_param_scheduler",
        "optimizer:around_get_scheduler",
        "start_run forward_step get_batch compute_loss finalize_gradients optimizer_step",
        "features see the schedule as run.scheduler; the step hands it out too",
        unless="train_step",
    ),
    intercepted(
        _CHECKPOINTING + "load_checkpoint",
        "checkpoint:around_load_checkpoint",
        "load_checkpoint after_load_checkpoint checkpoint_state restore_checkpoint_state model_state",
        "a run is loaded there, and its schedule from two places",
        any_of=_LOADS,
    ),
    intercepted(
        _CHECKPOINTING + "save_checkpoint",
        "checkpoint:around_save_checkpoint",
        "save_checkpoint before_save_checkpoint after_load_checkpoint",
        "a run is saved there",
    ),
    intercepted(
        _CHECKPOINTING + "generate_state_dict",
        "checkpoint:around_generate_state_dict",
        "checkpoint_state restore_checkpoint_state model_state",
        "what is saved and the template of what is loaded both come from it; the model is described there",
        any_of=("save",),
    ),
    intercepted(
        _CHECKPOINTING + "_load_base_checkpoint",
        "checkpoint:around_load_base_checkpoint",
        "load_checkpoint checkpoint_state restore_checkpoint_state",
        "what was loaded passes through it; its model is compared with the run's",
        any_of=_LOADS,
    ),
    intercepted(
        _TRAINING + "build_train_valid_test_data_iterators",
        "data:around_build_iterators",
        "build_data_iterators evaluate",
        "the iterators come from there",
    ),
    intercepted(
        _SCHEDULE,
        "step:around_get_schedule",
        "get_forward_backward boundary_schema forward_step get_batch compute_token_losses compute_loss "
        "reduce_losses",
        "training and evaluation ask it for the schedule; micro-batches are counted around it",
    ),
    intercepted(
        _SCHEDULE,
        "step:around_get_schedule",
        "start_run load_checkpoint",
        "before the first schedule everything is built and loaded",
        unless="train_step",
    ),
    *(
        intercepted(
            _SCHEDULE,
            "step:around_get_schedule",
            "",
            "losses of layers weigh by the tokens of a step, which are counted before it",
            models=(layers, "calculate_per_token_loss"),
        )
        for layers in ("num_experts", "mtp_num_layers")
    ),
    intercepted(
        _TRAINING + "train_step",
        "step:around_train_step",
        "train_step reduce_losses",
        "one step; before the first one everything is built and loaded",
        versions="0.15 and older take no iteration and return seven values",
    ),
    intercepted(
        _TRAINING + "training_log",
        "monitoring:around_training_log",
        "log_step",
        "the numbers of a step are printed and written there",
        versions="0.15 and older have decoupled_learning_rate as fourth argument",
    ),
    intercepted(
        _TRAINING + "evaluate",
        "monitoring:around_evaluate",
        "evaluate",
        "validation",
    ),
    intercepted(
        _TRAINING + "checkpoint_and_decide_exit",
        "monitoring:around_decide_exit",
        "should_stop",
        "the loop asks it whether to go on",
    ),
    intercepted(
        "megatron.legacy.fused_kernels:load",
        "emulation:no_kernels",
        "",
        "it compiles CUDA kernels",
        elsewhere=_CUDA,
        required=False,
    ),
    intercepted(
        "megatron.training.utils:get_device_arch_version",
        "emulation:old_enough",
        "",
        "it asks for a CUDA version that other devices do not have",
        elsewhere=(*_CUDA, *_EMULATED),
    ),
    intercepted(
        "torch.cuda:is_available",
        "emulation:says_available",
        "",
        "Megatron-LM trains only where it is",
        platforms=_EMULATED,
    ),
    intercepted(
        "torch.accelerator:is_available",
        "emulation:no_accelerator",
        "",
        "a torch made for CUDA would pin what data loaders read for the device that is not there",
        kind="replace",
        platforms=_EMULATED,
        required=False,
    ),
    *(
        intercepted(
            f"torch.cuda:{name}", f"emulation:{name}", "", reason, kind="replace", platforms=_EMULATED
        )
        for name, reason in (
            ("get_device_properties", "Megatron-LM asks which CUDA version the device has"),
            ("get_device_capability", "Megatron-LM asks which CUDA version the device has"),
            ("get_device_name", "Megatron-LM writes it down"),
        )
    ),
)
"""Applied when needed, taken back when the session closes."""
