"""The loop."""

import dataclasses
import sys

import torch
from megatron.core import mpu
from megatron.core.distributed import DistributedDataParallel as DDP
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.num_microbatches_calculator import (
    destroy_num_microbatches_calculator,
    get_num_microbatches,
    init_num_microbatches_calculator,
)
from megatron.core.optimizer import (
    AdamOptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config
from megatron.training.checkpointing import load_checkpoint, save_checkpoint
from megatron.training.global_vars import destroy_global_vars, get_args
from megatron.training.initialize import initialize_megatron, set_jit_fusion_options

printed = []
"""Lines of the log: the averages since the last one, by name."""


def destroy_global_state():
    destroy_global_vars()
    destroy_num_microbatches_calculator()
    mpu.destroy_model_parallel()


def pretrain(
    train_valid_test_dataset_provider,
    model_provider,
    model_type,
    forward_step_func,
    process_non_loss_data_func=None,
    extra_args_provider=None,
    args_defaults=(),
    get_embedding_ranks=None,
    get_position_embedding_ranks=None,
    non_loss_data_func=None,
    store=None,
):
    initialize_megatron(
        extra_args_provider=extra_args_provider,
        args_defaults=args_defaults,
        get_embedding_ranks=get_embedding_ranks,
        get_position_embedding_ranks=get_position_embedding_ranks,
        store=store,
    )
    run(
        get_model,
        train_valid_test_dataset_provider,
        model_provider,
        model_type,
        forward_step_func,
        process_non_loss_data_func,
        non_loss_data_func,
    )


def run(
    build,
    train_valid_test_dataset_provider,
    model_provider,
    model_type,
    forward_step_func,
    process_non_loss_data_func=None,
    non_loss_data_func=None,
):
    args = get_args()
    init_num_microbatches_calculator(
        args.rank, None, args.global_batch_size, args.micro_batch_size, args.data_parallel_size
    )
    set_jit_fusion_options()
    model, optimizer, scheduler = setup_model_and_optimizer(model_provider, model_type, build=build)
    config = get_model_config(model[0])
    chunks = args.virtual_pipeline_model_parallel_size
    iterators = [
        build_train_valid_test_data_iterators(train_valid_test_dataset_provider) for _ in range(chunks or 1)
    ]
    # Chunks of an interleaved schedule have an iterator each.
    train_iterator, valid_iterator, test_iterator = map(list, zip(*iterators)) if chunks else iterators[0]
    iteration = train(
        forward_step_func,
        model,
        optimizer,
        scheduler,
        train_iterator,
        valid_iterator,
        process_non_loss_data_func,
        config,
        {},
        non_loss_data_func,
    )[0]
    if args.save:
        save_checkpoint(iteration, model, optimizer, scheduler, 0, {})
    for iterator in (valid_iterator, test_iterator) if args.eval_iters else ():
        evaluate_and_print_results("end", forward_step_func, iterator, model, iteration, None, config)


def get_model(
    model_provider_func,
    model_type=ModelType.encoder_or_decoder,
    wrap_with_ddp=True,
    config=None,
    pg_collection=None,
):
    args = get_args()
    if pg_collection is None:
        pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    chunks = args.virtual_pipeline_model_parallel_size
    model = []
    for vp_stage in (None,) if chunks is None else range(chunks):
        place = {} if vp_stage is None else {"ignore_virtual": False, "vp_stage": vp_stage}
        chunk = model_provider_func(
            pre_process=mpu.is_pipeline_first_stage(**place),
            post_process=mpu.is_pipeline_last_stage(**place),
            config=config,
            pg_collection=pg_collection,
            **({} if vp_stage is None else {"vp_stage": vp_stage}),
        )
        chunk.model_type = model_type
        model.append(chunk.cuda(torch.cuda.current_device()))
    if args.bf16:
        model = [Float16Module(get_model_config(chunk), chunk) for chunk in model]
    if wrap_with_ddp:
        values = {
            field.name: getattr(args, field.name)
            for field in dataclasses.fields(DistributedDataParallelConfig)
            if hasattr(args, field.name)
        }
        values["bucket_size"] = args.ddp_bucket_size
        ddp_config = DistributedDataParallelConfig(**values)
        model = [DDP(config=get_model_config(chunk), ddp_config=ddp_config, module=chunk) for chunk in model]
    return model


def get_megatron_optimizer_config(args):
    if args.optimizer != "adam":
        raise ValueError("Invalid optimizer type!")
    values = {
        field.name: getattr(args, field.name)
        for field in dataclasses.fields(AdamOptimizerConfig)
        if hasattr(args, field.name)
    }
    config = AdamOptimizerConfig(**values)
    return config, get_standard_config_overrides(config=config)


def get_optimizer_param_scheduler(optimizer):
    args = get_args()
    steps = args.train_iters * args.global_batch_size
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * args.global_batch_size,
        lr_decay_steps=steps,
        lr_decay_style=args.lr_decay_style,
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
    )


def setup_model_and_optimizer(model_provider_func, model_type, checkpointing_context=None, build=None):
    args = get_args()
    model = (build or get_model)(model_provider_func, model_type, wrap_with_ddp=not args.skip_train)
    config, overrides = get_megatron_optimizer_config(args)
    optimizer = get_megatron_optimizer(config, model, config_overrides=overrides)
    scheduler = get_optimizer_param_scheduler(optimizer)
    if args.load is not None or args.pretrained_checkpoint is not None:
        args.iteration, _ = load_checkpoint(model, optimizer, scheduler)
    return model, optimizer, scheduler


def build_train_valid_test_data_iterators(build_train_valid_test_datasets_provider):
    args = get_args()
    samples = [args.train_iters * args.global_batch_size, args.global_batch_size, args.global_batch_size]
    datasets = build_train_valid_test_datasets_provider(samples)
    if args.dataloader_type == "external":
        return list(datasets)
    torch.rand(1)  # a loader draws the seed of its workers
    start = args.consumed_train_samples
    return [
        None if dataset is None else _batches(dataset, start if index == 0 else 0)
        for index, dataset in enumerate(datasets)
    ]


def _batches(dataset, start):
    args = get_args()
    rank, size = mpu.get_data_parallel_rank(), args.micro_batch_size
    while True:
        rows = [dataset[start + rank * size + index] for index in range(size)]
        yield torch.utils.data.default_collate(rows)
        start += size * args.data_parallel_size


def train_step(
    forward_step_func,
    data_iterator,
    model,
    optimizer,
    opt_param_scheduler,
    config,
    forward_backward_func,
    iteration=None,
):
    args = get_args()
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    reports = forward_backward_func(
        forward_step_func=forward_step_func,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=get_num_microbatches(),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=False,
    )
    successful, grad_norm, num_zeros = optimizer.step()
    if successful:
        opt_param_scheduler.step(increment=args.global_batch_size)
    return _mean(reports), int(not successful), False, False, 0, grad_norm, num_zeros, 0


def _mean(reports):
    if not mpu.is_pipeline_last_stage():
        return {}
    found = {}
    for name in reports[0]:
        total = torch.vstack([report[name].view(-1) for report in reports]).sum(dim=0)
        torch.distributed.all_reduce(total, group=mpu.get_data_parallel_group(with_context_parallel=True))
        found[name] = total[0] / total[1]
    return found


def training_log(
    loss_dict,
    total_loss_dict,
    learning_rate,
    iteration,
    loss_scale,
    report_memory_flag,
    skipped_iter,
    grad_norm,
    params_norm,
    num_zeros_in_grad,
    max_attention_logit,
    pg_collection=None,
    is_first_iteration=False,
):
    args = get_args()
    advanced = total_loss_dict.get("advanced iterations", 0) + (not skipped_iter)
    total_loss_dict["advanced iterations"] = advanced
    for name, value in loss_dict.items():
        total_loss_dict[name] = total_loss_dict.get(name, 0.0) + value
    if iteration % args.log_interval == 0:
        names = [name for name in total_loss_dict if name != "advanced iterations"]
        printed.append({name: float(total_loss_dict[name]) / max(1, advanced) for name in names})
        total_loss_dict.clear()
    return report_memory_flag


def save_checkpoint_and_time(
    iteration,
    model,
    optimizer,
    opt_param_scheduler,
    num_floating_point_operations_so_far,
    checkpointing_context,
    non_persistent_ckpt=False,
    train_data_iterator=None,
):
    save_checkpoint(
        iteration,
        model,
        optimizer,
        opt_param_scheduler,
        num_floating_point_operations_so_far,
        checkpointing_context,
        non_persistent_ckpt=non_persistent_ckpt,
        train_data_iterator=train_data_iterator,
    )


def checkpoint_and_decide_exit(
    model,
    optimizer,
    opt_param_scheduler,
    iteration,
    num_floating_point_operations_so_far,
    checkpointing_context,
    train_data_iterator,
):
    args = get_args()
    if args.save and args.save_interval and iteration % args.save_interval == 0:
        save_checkpoint_and_time(iteration, model, optimizer, opt_param_scheduler, 0, checkpointing_context)
    return bool(args.exit_interval and iteration % args.exit_interval == 0)


def train(
    forward_step_func,
    model,
    optimizer,
    opt_param_scheduler,
    train_data_iterator,
    valid_data_iterator,
    process_non_loss_data_func,
    config,
    checkpointing_context,
    non_loss_data_func,
    inference_model=None,
):
    args = get_args()
    for chunk in model:
        chunk.train()
    iteration = args.iteration
    total_loss_dict = {}
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    forward_backward_func = get_forward_backward_func()
    assert not args.profile, "the profiler of this loop needs CUDA"
    while iteration < args.train_iters:
        args.curr_iteration = iteration
        losses, skipped, _, _, _, grad_norm, num_zeros, logit = train_step(
            forward_step_func,
            train_data_iterator,
            model,
            optimizer,
            opt_param_scheduler,
            config,
            forward_backward_func,
            iteration=iteration,
        )
        iteration += 1
        args.consumed_train_samples += args.global_batch_size
        rate = max(group["lr"] for group in optimizer.param_groups)
        training_log(
            losses, total_loss_dict, rate, iteration, 1.0, True, skipped, grad_norm, None, num_zeros, logit
        )
        if iteration % args.eval_interval == 0:
            evaluate_and_print_results(
                "interval", forward_step_func, valid_data_iterator, model, iteration, None, config
            )
        if checkpoint_and_decide_exit(
            model, optimizer, opt_param_scheduler, iteration, 0, checkpointing_context, train_data_iterator
        ):
            sys.exit(0)
    return iteration, 0


def evaluate(
    forward_step_func,
    data_iterator,
    model,
    process_non_loss_data_func,
    config,
    verbose=False,
    non_loss_data_func=None,
    eval_iters=None,
):
    args = get_args()
    for chunk in model:
        chunk.eval()
    forward_backward_func = get_forward_backward_func()
    reports = []
    with torch.no_grad():
        for _ in range(args.eval_iters):
            reports += forward_backward_func(
                forward_step_func=forward_step_func,
                data_iterator=data_iterator,
                model=model,
                num_microbatches=get_num_microbatches(),
                seq_length=args.seq_length,
                micro_batch_size=args.micro_batch_size,
                forward_only=True,
            )
    for chunk in model:
        chunk.train()
    return _mean(reports), None, False


def evaluate_and_print_results(
    prefix,
    forward_step_func,
    data_iterator,
    model,
    iteration,
    process_non_loss_data_func,
    config,
    verbose=False,
    write_to_tensorboard=True,
    non_loss_data_func=None,
):
    losses = evaluate(forward_step_func, data_iterator, model, None, config, verbose)[0]
    printed.append({f"validation {name}": float(value) for name, value in losses.items()})
