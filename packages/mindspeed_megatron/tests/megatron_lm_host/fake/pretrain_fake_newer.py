"""A script as those of core_v0.18 and later: it reads its arguments, and hands settings to ``pretrain``."""

from functools import partial

import fake_newer
import torch
from fake_newer import BATCH_KEYS, GPTModelConfig, settings_of
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args
from pretrain_fake import Counting, gpt_builder, loss_func, model_provider

# Processes that write checkpoints import this script anew.
fake_newer.use()

from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args  # noqa: E402
from megatron.training.training import pretrain  # noqa: E402
from megatron.training.utils import (  # noqa: E402
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
    is_first_or_last_pipeline_stage,
)

BUILT = True


def get_batch(data_iterator, vp_stage=None):
    core_transformer_config_from_args(get_args())
    if not is_first_or_last_pipeline_stage(vp_stage):
        return [None for _ in BATCH_KEYS]
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch = {}
    if tp_rank == 0:
        batch = next(data_iterator)
        for key in BATCH_KEYS:
            batch.setdefault(key, None)
    batch = get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        tp_rank=tp_rank,
        micro_batch_size=get_args().micro_batch_size,
    )
    batch = get_batch_on_this_cp_rank(batch)
    return [batch[key] for key in BATCH_KEYS]


def forward_step(data_iterator, model, return_schedule_plan=False):
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    mask, ends, _, _, labels, _, loss_mask, _, position_ids, tokens = get_batch(data_iterator, vp_stage)
    assert ends is None
    output = model(tokens, position_ids, mask, labels=labels, packed_seq_params=None)
    return output, partial(loss_func, loss_mask, model=model)


def train_valid_test_datasets_provider(train_val_test_num_samples, vp_stage=None):
    built = is_first_or_last_pipeline_stage(vp_stage) and mpu.get_tensor_model_parallel_rank() == 0
    return tuple(Counting(length) if built else None for length in train_val_test_num_samples)


def provide(*args, **named):
    assert torch.distributed.is_initialized()
    return model_provider(gpt_builder, *args, **named)


if __name__ == "__main__":
    train_valid_test_datasets_provider.is_distributed = True
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    model = GPTModelConfig(core_transformer_config_from_args(args), provide) if BUILT else None
    pretrain(
        settings_of(args, model),
        train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        **({} if BUILT else {"model_provider": provide}),
    )
