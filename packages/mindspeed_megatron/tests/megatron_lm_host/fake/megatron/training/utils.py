"""Facts about the device and the pipeline, and the parts of a batch that a rank gets."""

from inspect import signature

import torch
from megatron.core import mpu, utils
from megatron.training.global_vars import get_args

_DTYPES = {
    "tokens": torch.int64,
    "labels": torch.int64,
    "loss_mask": torch.float32,
    "attention_mask": torch.bool,
    "position_ids": torch.int64,
}


def get_device_arch_version():
    return torch.cuda.get_device_properties(torch.device("cuda:0")).major


def is_first_or_last_pipeline_stage(vp_stage):
    place = {} if vp_stage is None else {"ignore_virtual": False, "vp_stage": vp_stage}
    return mpu.is_pipeline_first_stage(**place) or mpu.is_pipeline_last_stage(**place)


def get_batch_on_this_cp_rank(batch):
    split = utils.get_batch_on_this_cp_rank
    if "is_hybrid_cp" not in signature(split).parameters:
        return split(batch)
    # Since 0.19 megatron-core splits over all ranks where it is not told the group.
    return split(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())


def get_batch_on_this_tp_rank(data_iterator, mtp_on_this_rank=False):
    args = get_args()
    batch = dict.fromkeys(_DTYPES)
    if mpu.get_tensor_model_parallel_rank() == 0:
        batch.update({name: value for name, value in next(data_iterator).items() if name in batch})
    given = (
        *(("tokens", "position_ids") if mpu.is_pipeline_first_stage() else ()),
        *(("labels", "loss_mask") if mpu.is_pipeline_last_stage() else ()),
    )
    for name in given:
        if batch[name] is None:
            batch[name] = torch.empty((args.micro_batch_size, args.seq_length), dtype=_DTYPES[name])
        source = mpu.get_tensor_model_parallel_src_rank()
        torch.distributed.broadcast(batch[name], source, group=mpu.get_tensor_model_parallel_group())
    return batch
