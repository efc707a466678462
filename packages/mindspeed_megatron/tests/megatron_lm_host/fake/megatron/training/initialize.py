"""The start of a run."""

import random
from datetime import timedelta

import numpy as np
import torch
from megatron.core import mpu, tensor_parallel
from megatron.legacy import fused_kernels
from megatron.training.arguments import parse_args, validate_args
from megatron.training.checkpointing import load_args_from_checkpoint
from megatron.training.global_vars import get_args, set_global_variables
from megatron.training.yaml_arguments import validate_yaml


def initialize_megatron(
    extra_args_provider=None,
    args_defaults=(),
    ignore_unknown_args=False,
    allow_no_cuda=False,
    get_embedding_ranks=None,
    get_position_embedding_ranks=None,
    store=None,
):
    if not allow_no_cuda:
        assert torch.cuda.is_available(), "Megatron requires CUDA."
    args = parse_args(extra_args_provider, ignore_unknown_args)
    load_args_from_checkpoint(args)
    if args.yaml_cfg is not None:
        args = validate_yaml(args, args_defaults)
    else:
        validate_args(args, args_defaults)
    set_global_variables(args)
    _initialize_distributed(get_embedding_ranks, get_position_embedding_ranks, store)
    _set_random_seed(args.seed, args.data_parallel_random_init)
    fused_kernels.load(args)


def _initialize_distributed(get_embedding_ranks, get_position_embedding_ranks, store):
    args = get_args()
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            backend=args.distributed_backend,
            store=store,
            world_size=args.world_size,
            rank=args.rank,
            timeout=timedelta(minutes=1),
        )
    if torch.cuda.device_count() > 0 and not mpu.model_parallel_is_initialized():
        mpu.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            get_embedding_ranks=get_embedding_ranks,
            get_position_embedding_ranks=get_position_embedding_ranks,
        )


def _set_random_seed(
    seed_, data_parallel_random_init=False, te_rng_tracker=False, inference_rng_tracker=False
):
    seed = seed_ + 100 * mpu.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if torch.cuda.device_count() > 0:
        tensor_parallel.model_parallel_cuda_manual_seed(seed, te_rng_tracker, inference_rng_tracker)


def set_jit_fusion_options():
    _warmup_jit_function()


def _warmup_jit_function():
    torch.rand(8, device="cuda")
