"""Saving and loading."""

from pathlib import Path

import torch
from megatron.core import dist_checkpointing, mpu
from megatron.core.num_microbatches_calculator import update_num_microbatches
from megatron.training.global_vars import get_args

TRACKER = "latest_checkpointed_iteration.txt"


def unwrap_model(model):
    found = []
    for chunk in model:
        while hasattr(chunk, "module"):
            chunk = chunk.module
        found.append(chunk)
    return found


def load_args_from_checkpoint(args):
    return args


def _metadata():
    return {
        "distrib_optim_sharding_type": "dp_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
    }


def save_checkpoint(
    iteration,
    model,
    optimizer,
    opt_param_scheduler,
    num_floating_point_operations_so_far,
    checkpointing_context=None,
    non_persistent_ckpt=False,
    train_data_iterator=None,
    preprocess_common_state_dict_fn=None,
):
    args = get_args()
    metadata = _metadata()
    state = generate_state_dict(
        args,
        unwrap_model(model),
        optimizer,
        opt_param_scheduler,
        None,
        iteration=iteration,
        optim_sd_kwargs={"metadata": metadata},
        model_sd_kwargs={"metadata": metadata},
    )
    folder = Path(args.save) / f"iter_{iteration:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save(state, str(folder))
    torch.distributed.barrier()
    (Path(args.save) / TRACKER).write_text(str(iteration))
    torch.distributed.barrier()


def generate_state_dict(
    args,
    model,
    optimizer,
    opt_param_scheduler,
    rng_state,
    iteration=None,
    optim_sd_kwargs=None,
    model_sd_kwargs=None,
    rerun_state=None,
):
    state = {"checkpoint_version": 3.0, "consumed_train_samples": args.consumed_train_samples}
    if iteration is not None:
        state["iteration"] = iteration
    for index, chunk in enumerate(model):
        key = "model" if len(model) == 1 else f"model{index}"
        state[key] = chunk.sharded_state_dict(**model_sd_kwargs)
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(state, **optim_sd_kwargs)
        state["opt_param_scheduler"] = opt_param_scheduler.state_dict()
    return state


def _load_base_checkpoint(load_dir, args, rank0=False, sharded_state_dict=None, checkpointing_context=None):
    tracker = Path(load_dir) / TRACKER
    if not tracker.is_file():
        return None, "", False, None
    folder = str(Path(load_dir) / f"iter_{int(tracker.read_text()):07d}")
    if rank0:
        return dist_checkpointing.load_common_state_dict(folder), folder, False, "global"
    return dist_checkpointing.load(sharded_state_dict, folder), folder, False, "global"


def load_checkpoint(
    ddp_model,
    optimizer,
    opt_param_scheduler,
    load_arg="load",
    strict=True,
    checkpointing_context=None,
    skip_load_to_model_and_opt=False,
):
    args = get_args()
    load_dir, ddp_optimizer = getattr(args, load_arg), optimizer
    if args.pretrained_checkpoint is not None and not (Path(load_dir or "") / TRACKER).is_file():
        load_dir = args.pretrained_checkpoint
        args.finetune = True
    model = unwrap_model(ddp_model)
    common = _load_base_checkpoint(load_dir, args, rank0=True)[0]
    if common is None:
        return 0, 0
    if args.finetune:
        optimizer = None
    metadata = _metadata()
    with_optimizer = optimizer is not None and not args.finetune and not args.no_load_optim
    template = generate_state_dict(
        args,
        model,
        optimizer if with_optimizer else None,
        opt_param_scheduler if with_optimizer else None,
        None,
        optim_sd_kwargs={"metadata": metadata, "is_loading": True},
        model_sd_kwargs={"metadata": metadata},
    )
    state = _load_base_checkpoint(load_dir, args, rank0=False, sharded_state_dict=template)[0]
    if not args.finetune:
        args.consumed_train_samples = state["consumed_train_samples"]
    update_num_microbatches(args.consumed_train_samples)
    for index, chunk in enumerate(model):
        chunk.load_state_dict(state["model" if len(model) == 1 else f"model{index}"], strict=strict)
    if with_optimizer:
        optimizer.load_state_dict(state["optimizer"])
        opt_param_scheduler.load_state_dict(state["opt_param_scheduler"])
    elif ddp_optimizer is not None:
        ddp_optimizer.reload_model_params()
    return 0 if args.finetune else state["iteration"], 0
