"""A script as Megatron-LM's are: functions for the data, the model and the step, handed to ``pretrain``."""

from functools import partial

import torch
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, pretrain
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import (
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
    is_first_or_last_pipeline_stage,
)


def gpt_builder(args, pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    if config is None:
        config = core_transformer_config_from_args(args)
    layer = get_gpt_layer_local_spec(
        num_experts=args.num_experts,
        normalization=args.normalization,
        qk_layernorm=args.qk_layernorm,
        multi_latent_attention=args.multi_latent_attention,
    )
    further = None
    if args.mtp_num_layers is not None:
        further = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False, vp_stage=vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=layer,
        mtp_block_spec=further,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def model_provider(
    model_builder, pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None
):
    return model_builder(get_args(), pre_process, post_process, vp_stage, config, pg_collection)


def get_batch(data_iterator, vp_stage=None):
    core_transformer_config_from_args(get_args())
    if not is_first_or_last_pipeline_stage(vp_stage):
        return None, None, None, None, None, None
    batch = get_batch_on_this_cp_rank(get_batch_on_this_tp_rank(data_iterator))
    return (*batch.values(), None)


def loss_func(loss_mask, output_tensor, model=None):
    losses = output_tensor.view(-1).float()
    total = torch.sum(losses * loss_mask.view(-1))
    num_tokens = loss_mask.sum().to(torch.int)
    report = torch.cat([total.detach().clone().view(1), num_tokens.view(1)])
    return total, num_tokens, {"lm loss": report}


def forward_step(data_iterator, model, return_schedule_plan=False):
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    tokens, labels, loss_mask, attention_mask, position_ids, packed = get_batch(data_iterator, vp_stage)
    output = model(tokens, position_ids, attention_mask, labels=labels, packed_seq_params=packed)
    return output, partial(loss_func, loss_mask, model=model)


class Counting(torch.utils.data.Dataset):
    """Rows that count upwards from another number each; where positions start again, every seven tokens."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        args = get_args()
        places = torch.arange(args.seq_length + 1)
        row = (places * (1 + index % 3) + 7 * index) % args.vocab_size
        return {
            "tokens": row[:-1],
            "labels": row[1:],
            "loss_mask": (row[1:] % 5 != 0).float() if args.eod_mask_loss else torch.ones(args.seq_length),
            "position_ids": (places[:-1] + index) % 7 if args.reset_position_ids else places[:-1],
        }


def is_dataset_built_on_rank(vp_stage=None):
    return is_first_or_last_pipeline_stage(vp_stage) and mpu.get_tensor_model_parallel_rank() == 0


def train_valid_test_datasets_provider(train_val_test_num_samples, vp_stage=None):
    built = is_dataset_built_on_rank(vp_stage)
    return tuple(Counting(length) if built else None for length in train_val_test_num_samples)


if __name__ == "__main__":
    train_valid_test_datasets_provider.is_distributed = True
    pretrain(
        train_valid_test_datasets_provider,
        partial(model_provider, gpt_builder),
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"tokenizer_type": "NullTokenizer"},
    )
