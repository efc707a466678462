"""The command line."""

import argparse
import os

import torch
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.training.utils import get_device_arch_version


def add_megatron_arguments(parser):
    group = parser.add_argument_group(title="everything")
    add = group.add_argument
    add("--recompute-modules", nargs="+", type=str)
    for name, default in (
        ("num-layers", 2),
        ("hidden-size", 32),
        ("num-attention-heads", 4),
        ("seq-length", 16),
        ("max-position-embeddings", 16),
        ("micro-batch-size", 2),
        ("global-batch-size", 4),
        ("train-iters", 3),
        ("eval-iters", 1),
        ("eval-interval", 100),
        ("log-interval", 1),
        ("seed", 1234),
        ("tensor-model-parallel-size", 1),
        ("pipeline-model-parallel-size", 1),
        ("context-parallel-size", 1),
        ("vocab-size", 64),
        ("make-vocab-size-divisible-by", 1),
        ("profile-step-start", 10),
        ("profile-step-end", 12),
        ("exit-interval", None),
        ("save-interval", None),
        ("ddp-bucket-size", None),
        ("lr-warmup-iters", 0),
        ("num-virtual-stages-per-pipeline-rank", None),
        ("mtp-num-layers", None),
        ("q-lora-rank", None),
        ("kv-lora-rank", 16),
        ("qk-head-dim", 16),
        ("qk-pos-emb-head-dim", 8),
        ("v-head-dim", 16),
        ("recompute-num-layers", None),
        ("ffn-hidden-size", None),
        ("kv-channels", None),
        ("num-query-groups", None),
    ):
        add(f"--{name}", type=int, default=default)
    for name in (
        "sequence-parallel swiglu bf16 fp16 use-distributed-optimizer use-torch-fsdp2 use-megatron-fsdp "
        "finetune profile skip-train overlap-grad-reduce untie-embeddings-and-output-weights "
        "overlap-param-gather "
        "accumulate-allreduce-grads-in-fp32 data-parallel-random-init te-rng-tracker inference-rng-tracker "
        "use-persistent-ckpt-worker ddp-average-in-collective no-persist-layer-norm no-load-optim "
        "no-load-rng qk-layernorm mock-data reset-position-ids reset-attention-mask eod-mask-loss "
        "multi-latent-attention moe-pad-expert-input-to-capacity override-opt-param-scheduler "
        "rotary-interleaved use-pytorch-profiler group-query-attention use-rope-scaling"
    ).split():
        add(f"--{name}", action="store_true")
    add("--disable-bias-linear", action="store_false", dest="add_bias_linear")
    add("--no-masked-softmax-fusion", action="store_false", dest="masked_softmax_fusion")
    add("--no-rope-fusion", action="store_false", dest="apply_rope_fusion")
    add("--no-gradient-accumulation-fusion", action="store_false", dest="gradient_accumulation_fusion")
    add("--no-bias-swiglu-fusion", action="store_false", dest="bias_swiglu_fusion")
    add("--no-check-for-nan-in-loss-and-grad", action="store_false", dest="check_for_nan_in_loss_and_grad")
    add(
        "--no-create-attention-mask-in-dataloader",
        action="store_false",
        dest="create_attention_mask_in_dataloader",
    )
    # Off in Megatron-LM; tests train on beyond the planned end.
    kept = argparse.BooleanOptionalAction
    add("--use-checkpoint-opt-param-scheduler", action=kept, default=True)
    add("--profile-ranks", nargs="+", type=int, default=[0])
    # Whole minutes in Megatron-LM; tests have less time.
    add("--distributed-timeout-minutes", type=float, default=10)
    add("--lr", type=float, default=1e-2)
    add("--min-lr", type=float, default=0.0)
    add("--norm-epsilon", type=float, default=1e-5)
    add("--rotary-base", type=int, default=10000)
    add("--adam-beta2", type=float, default=0.999)
    add("--hidden-dropout", type=float, default=0.0)
    add("--attention-dropout", type=float, default=0.0)
    add("--normalization", default="LayerNorm", choices=["LayerNorm", "RMSNorm"])
    add("--position-embedding-type", default="learned_absolute", choices=("learned_absolute", "rope"))
    add("--transformer-impl", default="transformer_engine", choices=["local", "transformer_engine"])
    add("--optimizer", default="adam", choices=["adam", "sgd", "muon", "dist_muon"])
    add("--lr-decay-style", default="linear", choices=["constant", "linear", "cosine"])
    add("--distributed-backend", default="nccl", choices=["nccl", "gloo"])
    add("--ckpt-format", default="torch_dist", choices=["torch_dist", "torch"])
    experts = ("num-experts", "moe-ffn-hidden-size", "moe-shared-expert-intermediate-size")
    for name in (*experts, "expert-tensor-parallel-size"):
        add(f"--{name}", type=int)
    add("--moe-token-dispatcher-type", default="allgather", choices=["allgather", "alltoall"])
    add("--moe-router-topk", type=int, default=2)
    add("--expert-model-parallel-size", type=int, default=1)
    add("--moe-aux-loss-coeff", type=float, default=0.0)
    add("--moe-z-loss-coeff", type=float)
    add("--moe-router-load-balancing-type", default="aux_loss")
    add("--moe-token-drop-policy", default="probs", choices=["probs", "position"])
    add("--softmax-type", default="vanilla", choices=["vanilla", "off-by-one", "learnable"])
    add("--moe-expert-capacity-factor", type=float)
    add("--recompute-granularity", choices=["full", "selective"])
    add("--recompute-method", choices=["uniform", "block"])
    add("--calculate-per-token-loss", action="store_true")
    add("--use-cpu-initialization", action="store_true")
    add("--save")
    add("--load")
    add("--pretrained-checkpoint")
    add("--yaml-cfg")
    add("--split")
    return parser


def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    parser = argparse.ArgumentParser(description="Megatron-LM Arguments", allow_abbrev=False)
    parser = add_megatron_arguments(parser)
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    args = parser.parse_known_args()[0] if ignore_unknown_args else parser.parse_args()
    args.rank = int(os.getenv("RANK", "0"))
    args.world_size = int(os.getenv("WORLD_SIZE", "1"))
    args.local_rank = int(os.getenv("LOCAL_RANK", "0"))
    return args


def validate_args(args, defaults=()):
    for name, value in dict(defaults).items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    sharded = max(args.tensor_model_parallel_size, args.context_parallel_size) > 1
    if sharded and get_device_arch_version() < 10:
        assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1", "set CUDA_DEVICE_MAX_CONNECTIONS to 1"
    if args.transformer_impl == "transformer_engine":
        raise RuntimeError("Transformer Engine is not installed")
    model_parallel = (
        args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    )
    args.data_parallel_size = args.world_size // model_parallel
    args.params_dtype = torch.bfloat16 if args.bf16 else torch.float32
    args.padded_vocab_size = None
    args.variable_seq_lengths = False
    args.dataloader_type = "single"
    args.consumed_train_samples = 0
    args.consumed_valid_samples = 0
    args.iteration = 0
    if "muon" in args.optimizer:
        assert not args.use_distributed_optimizer, "Muon optimizer does not support distributed optimizer"
    if args.override_opt_param_scheduler:
        args.use_checkpoint_opt_param_scheduler = False
    args.virtual_pipeline_model_parallel_size = args.num_virtual_stages_per_pipeline_rank
    return args


def core_transformer_config_from_args(args, config_class=None):
    latent = {}
    if args.multi_latent_attention:
        config_class = config_class or MLATransformerConfig
        ranks = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        latent = {name: getattr(args, name) for name in ranks}
    config_class = config_class or TransformerConfig
    return config_class(
        **latent,
        multi_latent_attention=args.multi_latent_attention,
        mtp_num_layers=args.mtp_num_layers,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        recompute_granularity=args.recompute_granularity,
        recompute_method=args.recompute_method,
        recompute_num_layers=args.recompute_num_layers,
        moe_expert_capacity_factor=args.moe_expert_capacity_factor,
        moe_pad_expert_input_to_capacity=args.moe_pad_expert_input_to_capacity,
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        kv_channels=args.kv_channels,
        num_attention_heads=args.num_attention_heads,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        sequence_parallel=args.sequence_parallel,
        pipeline_dtype=args.params_dtype,
        params_dtype=args.params_dtype,
        normalization=args.normalization,
        add_bias_linear=args.add_bias_linear,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        bias_activation_fusion=args.bias_swiglu_fusion if args.swiglu else False,
        masked_softmax_fusion=args.masked_softmax_fusion,
        gradient_accumulation_fusion=args.gradient_accumulation_fusion,
        apply_rope_fusion=args.apply_rope_fusion,
        persist_layer_norm=not args.no_persist_layer_norm,
        hidden_dropout=args.hidden_dropout,
        attention_dropout=args.attention_dropout,
        qk_layernorm=args.qk_layernorm,
        layernorm_epsilon=args.norm_epsilon,
        rotary_interleaved=args.rotary_interleaved,
        bf16=args.bf16,
        num_moe_experts=args.num_experts,
        moe_ffn_hidden_size=args.moe_ffn_hidden_size,
        moe_shared_expert_intermediate_size=args.moe_shared_expert_intermediate_size,
        moe_token_dispatcher_type=args.moe_token_dispatcher_type,
        moe_router_topk=args.moe_router_topk,
        moe_aux_loss_coeff=args.moe_aux_loss_coeff,
        moe_z_loss_coeff=args.moe_z_loss_coeff,
        moe_router_load_balancing_type=args.moe_router_load_balancing_type,
        moe_token_drop_policy=args.moe_token_drop_policy,
        softmax_type=args.softmax_type,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        calculate_per_token_loss=args.calculate_per_token_loss,
        use_cpu_initialization=args.use_cpu_initialization,
        variable_seq_lengths=args.variable_seq_lengths,
        recompute_modules=args.recompute_modules,
    )
