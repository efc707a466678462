"""Default validation of the arguments, and the values that are derived from them.

Wrong sizes are reported before anything starts, each with its flag, value and the way out.
"""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from mindspeed_core.errors import ArgumentError
from mindspeed_core.feature import hookimpl
from mindspeed_megatron.data_source import check_only_source, data_source, reads_files
from mindspeed_megatron.uneven_partition import leaves_partition
from mindspeed_train.arguments.errors import argument_error, option
from mindspeed_train.arguments.folders import check_folders
from mindspeed_train.arguments.fully_sharded import check_connections, check_fully_sharded
from mindspeed_train.arguments.model import check_model
from mindspeed_train.arguments.ranges import check_limits
from mindspeed_train.arguments.rank_groups import check_optimizer_instances, check_rank_order
from mindspeed_train.arguments.run_length import derive_batch, derive_schedule
from mindspeed_train.arguments.stores import check_stores
from mindspeed_train.data.sources import data_sources
from mindspeed_train.monitoring.writers import check_writers
from mindspeed_train.text.stages import build_for_session, check_vocabulary

if TYPE_CHECKING:
    from mindspeed_core.session import Session

_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size")
_POSITIVE = (
    *_REQUIRED,
    *(
        "ffn_hidden_size kv_channels num_query_groups max_position_embeddings make_vocab_size_divisible_by "
        "vocab_size tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
        "num_layers_per_virtual_pipeline_stage global_batch_size train_iters train_samples lr_decay_samples "
        "log_interval peak_tflops straggler_minmax_count tensorboard_log_interval tensorboard_queue_size "
        "eval_interval save_interval keep_last_n exit_interval ddp_bucket_size ddp_num_buckets "
        "expert_model_parallel_size expert_tensor_parallel_size "
        "num_virtual_stages_per_pipeline_rank moe_router_topk moe_ffn_hidden_size asked_padded_vocab_size "
        "save_retain_interval check_weight_hash_across_dp_replicas_interval "
        "num_distributed_optimizer_instances"
    ).split(),
)
_NOT_NEGATIVE = (
    "eval_iters num_workers clip_grad weight_decay lr min_lr lr_warmup_iters lr_warmup_samples seed "
    "init_method_std manual_gc_interval recompute_num_layers"
).split()


_YEAR_IN_MINUTES = 525_600


@hookimpl(trylast=True)
def validate_arguments(session: Session, args: Namespace) -> Namespace:
    """Check sizes and derive what the other stages read."""
    _check_ranges(session, args)
    check_limits(args)
    _check_needs_feature(session, args)
    check_writers(args)
    _check_fault_tolerance(args)
    _derive_world(session, args)
    check_stores(args)
    check_folders(args)
    _derive_model(session, args)
    check_fully_sharded(args)
    check_connections(session.platform.kinds(), args)
    training = session.mode == "train"
    derive_batch(args, own_schedule=not training or "pipeline-schedule" in session.plan.slots)
    if training:
        _check_data(session, args)
        _derive_training(args)
    else:
        # A text that is continued has any length, which ranks cannot share evenly; results are the same.
        args.sequence_parallel = False
    return args


def _check_ranges(session: Session, args: Namespace) -> None:
    required = _REQUIRED if session.mode == "train" else _REQUIRED[:4]
    for name in required:
        if getattr(args, name) is None:
            raise argument_error(args, option(name), "is required", "give it a value")
    for name in _POSITIVE:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise argument_error(args, option(name), "must be at least 1", "raise it, or leave it out")
    for name in _NOT_NEGATIVE:
        value = getattr(args, name)
        if value is not None and value < 0:
            raise argument_error(args, option(name), "must not be negative", "use 0 or more")
    for name in ("attention_dropout", "hidden_dropout"):
        if not 0.0 <= getattr(args, name) < 1.0:
            raise argument_error(args, option(name), "is not a probability below 1", "use 0 for none")


def _check_needs_feature(session: Session, args: Namespace) -> None:
    """Refuse what only a feature can do where none of the active ones does it."""
    if (
        args.context_parallel_size > 1
        and args.transformer_impl == "local"
        and not session.claims("--context-parallel-size")
    ):
        reason = "megatron-core's local attention works on whole sequences"
        remedy = "use 1, or a plugin that brings context parallelism"
        raise argument_error(args, "--context-parallel-size", reason, remedy)
    if (
        args.reset_attention_mask
        and not args.create_attention_mask_in_dataloader
        and not session.claims("--reset-attention-mask")
    ):
        reason = "without a dense mask nothing keeps attention within a document"
        remedy = "add --create-attention-mask-in-dataloader"
        raise argument_error(args, "--reset-attention-mask", reason, remedy)


def _check_fault_tolerance(args: Namespace) -> None:
    if args.exit_duration_in_mins is not None and args.exit_duration_in_mins <= 0:
        raise argument_error(args, "--exit-duration-in-mins", "must be positive", "drop it for no limit")
    if args.loss_spike_factor <= 1:
        raise argument_error(
            args, "--loss-spike-factor", "an ordinary loss would be a spike", "use more than 1"
        )
    if args.bad_step_limit < 1:
        raise argument_error(args, "--bad-step-limit", "must be at least 1", "or use --bad-step-action stop")
    if not 0 < args.distributed_timeout_minutes <= _YEAR_IN_MINUTES:
        reason = f"is not above 0 and up to {_YEAR_IN_MINUTES} (a year)"
        raise argument_error(args, "--distributed-timeout-minutes", reason, "use 10, for instance")
    if args.hang_timeout_minutes is not None and args.hang_timeout_minutes < 0:
        raise argument_error(args, "--hang-timeout-minutes", "must not be negative", "0 switches it off")


def _derive_world(session: Session, args: Namespace) -> None:
    args.rank, args.world_size, args.local_rank = session.place_in_world()
    tp, pp, cp = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.context_parallel_size,
    )
    if args.world_size % (tp * pp * cp):
        reason = (
            f"tensor x pipeline x context = {tp} x {pp} x {cp} = {tp * pp * cp} does not divide the world "
            f"size {args.world_size}"
        )
        remedy = f"start {tp * pp * cp} processes (or a multiple), or lower a size"
        raise argument_error(args, "--tensor-model-parallel-size", reason, remedy)
    args.data_parallel_size = args.world_size // (tp * pp * cp)
    check_rank_order(args)
    check_optimizer_instances(args)
    if args.sequence_parallel and tp == 1:
        # Megatron-LM does the same: with one tensor-parallel rank there is nothing to shard.
        args.sequence_parallel = False
    if args.sequence_parallel and args.seq_length % (tp * cp) and not leaves_partition(session):
        reason = f"--sequence-parallel shards it over {tp * cp} ranks, which does not divide it"
        raise argument_error(args, "--seq-length", reason, f"use a multiple of {tp * cp}")
    if args.use_distributed_optimizer and args.optimizer == "sgd":
        reason = "megatron-core shards the state of Adam alone"
        raise argument_error(args, "--use-distributed-optimizer", reason, "drop it, or use --optimizer adam")
    if args.ddp_num_buckets is not None and args.ddp_bucket_size is not None:
        raise argument_error(
            args, "--ddp-num-buckets", "--ddp-bucket-size decides the same", "drop one of them"
        )
    if args.overlap_param_gather and not args.use_distributed_optimizer:
        reason = "gathers what the distributed optimizer sharded"
        raise argument_error(args, "--overlap-param-gather", reason, "add --use-distributed-optimizer")
    if args.overlap_param_gather and not args.overlap_grad_reduce:
        raise argument_error(
            args, "--overlap-param-gather", "works on the buckets of the overlap", "add --overlap-grad-reduce"
        )


def _derive_model(session: Session, args: Namespace) -> None:
    tp = args.tensor_model_parallel_size
    heads = args.num_attention_heads
    if args.kv_channels is None:
        if args.hidden_size % heads:
            reason = f"is not divisible by --num-attention-heads {heads}"
            raise argument_error(args, "--hidden-size", reason, "use a multiple, or give --kv-channels")
        args.kv_channels = args.hidden_size // heads
    even = not leaves_partition(session)
    if heads % tp and even:
        reason = f"is not divisible by --tensor-model-parallel-size {tp}"
        remedy = f"use a multiple of {tp}, or a tensor-parallel size that divides {heads}"
        raise argument_error(args, "--num-attention-heads", reason, remedy)
    if args.group_query_attention:
        groups = args.num_query_groups
        if heads % groups:
            reason = f"does not divide --num-attention-heads {heads}"
            raise argument_error(args, "--num-query-groups", reason, "use a divisor")
        if groups % tp and tp % groups and even:
            reason = f"is neither a multiple nor a divisor of --tensor-model-parallel-size {tp}"
            raise argument_error(args, "--num-query-groups", reason, f"use a multiple of {tp}")
    if args.ffn_hidden_size is None:
        # Megatron-LM's rule: SwiGLU has three matrices, so two thirds of the width keep the parameter count.
        args.ffn_hidden_size = (
            int((4 * args.hidden_size * 2 / 3) / 64) * 64 if args.swiglu else 4 * args.hidden_size
        ) or 64
    if args.ffn_hidden_size % tp and even:
        reason = f"is not divisible by --tensor-model-parallel-size {tp}"
        raise argument_error(args, "--ffn-hidden-size", reason, f"use a multiple of {tp}")
    check_model(session, args)
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    if args.seq_length > args.max_position_embeddings:
        reason = f"exceeds --max-position-embeddings {args.max_position_embeddings}"
        raise argument_error(args, "--seq-length", reason, "lower it, or raise the other")
    _derive_vocabulary(session, args)


def _derive_vocabulary(session: Session, args: Namespace) -> None:
    tokenizer = build_for_session(session, args)
    ids = args.vocab_size
    if ids is None or args.tokenizer_type == "NullTokenizer":
        ids = tokenizer.vocab_size
        args.vocab_size = args.vocab_size or ids
    multiple = args.make_vocab_size_divisible_by
    if not leaves_partition(session):
        multiple *= args.tensor_model_parallel_size
    args.padded_vocab_size = -(-ids // multiple) * multiple
    asked = args.asked_padded_vocab_size
    if asked is not None:
        if asked < ids:
            reason = f"is less than the {ids} ids of the tokenizer or --vocab-size"
            raise ArgumentError(
                "--padded-vocab-size", asked, reason, f"use {args.padded_vocab_size}, or more"
            )
        size = args.tensor_model_parallel_size
        if asked % size and not leaves_partition(session):
            reason = f"is not divisible by --tensor-model-parallel-size {size}"
            raise ArgumentError("--padded-vocab-size", asked, reason, f"use a multiple of {size}")
        args.padded_vocab_size = asked
    check_vocabulary(session, tokenizer, args)


def _check_data(session: Session, args: Namespace) -> None:
    if data_source(session):
        check_only_source(session, args)
        if not reads_files(session):
            return
    sources = data_sources(args)
    if sources.per_split is not None and session.provenance.get("split", "default") != "default":
        raise argument_error(args, "--split", "each split has its own data already", "drop it")
    if args.multiple_validation_sets and (sources.per_split is None or sources.per_split[1] is None):
        raise argument_error(
            args, "--multiple-validation-sets", "works on --valid-data-path alone", "name the datasets there"
        )
    validation = sources.blend(1)
    if validation is None or validation.weights is None:
        return
    for name in ("full_validation", "multiple_validation_sets"):
        if getattr(args, name):
            reason = f"the weights in {validation.flag} have no meaning then"
            raise argument_error(args, option(name), reason, "drop them")


def _check_schedule(args: Namespace) -> None:
    """Check what megatron-core's schedule asserts of its numbers."""
    if args.lr_warmup_init > args.lr:
        raise argument_error(args, "--lr-warmup-init", f"exceeds --lr {args.lr}", "start at or below it")
    start, end = args.start_weight_decay, args.end_weight_decay
    if start < 0:
        raise argument_error(args, "--start-weight-decay", "must not be negative", "use 0 or more")
    if start > end:
        reason = f"exceeds the {end} at the end: it only grows"
        raise argument_error(args, "--start-weight-decay", reason, "raise --end-weight-decay")
    if start != end and args.weight_decay_incr_style == "constant":
        reason = f"differs from the {end} at the end, and nothing leads there"
        raise argument_error(args, "--start-weight-decay", reason, "add --weight-decay-incr-style linear")
    if args.finetune and args.use_checkpoint_opt_param_scheduler:
        reason = "contradicts --finetune, which begins a schedule of its own"
        raise argument_error(args, "--use-checkpoint-opt-param-scheduler", reason, "drop one of the two")
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        reason = "--use-checkpoint-opt_param-scheduler is given too"
        raise argument_error(args, "--override-opt_param-scheduler", reason, "keep one of the two")


def _derive_training(args: Namespace) -> None:
    if args.skip_train:
        # There is no optimizer then; Megatron-LM switches its loading off in the same way.
        args.no_load_optim = True
        args.overlap_param_gather = args.overlap_grad_reduce = False
        args.train_iters = args.train_iters or 0
        return
    if args.lr is None:
        raise argument_error(args, "--lr", "is required", "give a learning rate")
    if args.min_lr > args.lr:
        raise argument_error(args, "--min-lr", f"exceeds --lr {args.lr}", "end at or below it")
    derive_schedule(args)
    if args.start_weight_decay is None:
        args.start_weight_decay = args.weight_decay
    if args.end_weight_decay is None:
        args.end_weight_decay = args.weight_decay
    _check_schedule(args)
    if args.save_retain_interval is not None and args.keep_last_n is not None:
        reason = "--keep-last-n decides which checkpoints stay, too"
        raise argument_error(args, "--save-retain-interval", reason, "keep one of the two")
    if args.save_interval and not args.save:
        raise argument_error(args, "--save-interval", "there is nowhere to save", "add --save FOLDER")
