"""The order of core_v0.18 and later in the made-up Megatron-LM: a script reads its arguments, then trains.

What is the same stays that of ``fake/``; `use` changes its modules in a process of its own.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import fake_training as fake

SCRIPT = fake.FAKE / "pretrain_fake_newer.py"
"""Its model comes from a builder, as in core_v0.19; see `PROVIDED`."""

PROVIDED = (("BUILT = True", "BUILT = False"),)
"""The change of the script with which its model comes from a function of it, as in core_v0.18."""


def use():
    """Put the newer functions in place of the older ones; harmless when repeated."""
    fake.use_fake()
    arguments = importlib.import_module("megatron.training.arguments")
    if hasattr(arguments, "parse_and_validate_args"):
        return
    training = importlib.import_module("megatron.training.training")
    initialize = importlib.import_module("megatron.training.initialize")
    package = importlib.import_module("megatron.training")

    def parse_and_validate_args(extra_args_provider=None, ignore_unknown_args=False, args_defaults=()):
        args = arguments.parse_args(extra_args_provider, ignore_unknown_args)
        if args.yaml_cfg is not None:
            args = importlib.import_module("megatron.training.yaml_arguments").validate_yaml(
                args, args_defaults
            )
        else:
            arguments.validate_args(args, args_defaults)
        initialize.set_global_variables(args)
        return args

    def get_batch_on_this_tp_rank(batch, broadcast_src_rank, broadcast_group, tp_rank, micro_batch_size):
        return spread(batch, broadcast_src_rank, broadcast_group, tp_rank, micro_batch_size)

    def pretrain(
        cfg_container,
        train_valid_test_dataset_provider,
        model_type,
        forward_step_func,
        model_provider=None,
        process_non_loss_data_func=None,
        get_embedding_ranks=None,
        get_position_embedding_ranks=None,
        non_loss_data_func=None,
        store=None,
    ):
        args = training.get_args()
        initialize._initialize_distributed(get_embedding_ranks, get_position_embedding_ranks, store)
        initialize._set_random_seed(args.seed, args.data_parallel_random_init)

        def build(provider, kind, wrap_with_ddp=True):
            if cfg_container.model is None:
                return training.get_model(provider, kind, wrap_with_ddp)
            builder = cfg_container.model.get_builder_cls()(cfg_container.model)
            return builder.build_distributed_models(groups(), wrap_with_ddp=wrap_with_ddp)

        training.run(
            build,
            train_valid_test_dataset_provider,
            model_provider,
            model_type,
            forward_step_func,
            process_non_loss_data_func,
            non_loss_data_func,
        )

    for module, function in (
        (arguments, parse_and_validate_args),
        (training, pretrain),
        (importlib.import_module("megatron.training.utils"), get_batch_on_this_tp_rank),
    ):
        function.__module__, function.__qualname__ = module.__name__, function.__name__
        setattr(module, function.__name__, function)
    package.pretrain = pretrain


def groups():
    """The groups that megatron-core made."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection.use_mpu_process_groups()


def spread(batch, source, group, tp_rank, micro_batch_size):
    """Give every tensor-parallel rank the parts that Megatron-LM's model needs on this pipeline stage."""
    import torch
    from megatron.core import mpu
    from megatron.training import get_args

    kinds = {"tokens": torch.int64, "labels": torch.int64, "loss_mask": torch.float32}
    kinds |= {"attention_mask": torch.bool, "position_ids": torch.int64}
    needed = (
        *(("tokens", "position_ids") if mpu.is_pipeline_first_stage() else ()),
        *(("labels", "loss_mask") if mpu.is_pipeline_last_stage() else ()),
    )
    if tp_rank != 0:
        batch = dict.fromkeys(BATCH_KEYS)
        shape = (micro_batch_size, get_args().seq_length)
        batch |= {name: torch.empty(shape, dtype=kinds[name]) for name in needed}
    for name in needed:
        torch.distributed.broadcast(batch[name], source, group=group)
    for name in {"tokens", "labels", "loss_mask", "position_ids"}.difference(needed):
        batch[name] = None
    return batch


BATCH_KEYS = (
    *("attention_mask", "cu_seqlens", "cu_seqlens_padded", "hybrid_cp_group", "labels", "local_cp_size"),
    *("loss_mask", "max_seqlen", "position_ids", "tokens"),
)


class GPTModelConfig:
    """Settings of which a builder makes a model."""

    def __init__(self, transformer, provider):
        self.transformer = transformer
        self.provider = provider

    def get_builder_cls(self):
        """The class that builds it."""
        return Builder


class Builder:
    """Builds chunks, and wraps them."""

    def __init__(self, model_config):
        self._model_config = model_config

    def build_model(self, pg_collection, pre_process=None, post_process=None, vp_stage=None):
        """One chunk."""
        config = self._model_config
        return config.provider(
            pre_process, post_process, vp_stage, config=config.transformer, pg_collection=pg_collection
        )

    def build_distributed_models(self, pg_collection, ddp_config=None, wrap_with_ddp=True):
        """The chunks of this rank."""
        training = importlib.import_module("megatron.training.training")

        def provider(pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
            return self.build_model(
                pg_collection, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage
            )

        return training.get_model(provider, wrap_with_ddp=wrap_with_ddp, pg_collection=pg_collection)


def settings_of(args, model):
    """The settings that a script hands to ``pretrain``."""
    recorded = SimpleNamespace(record_memory_history=getattr(args, "record_memory_history", False))
    return SimpleNamespace(model=model, profiling=recorded)
