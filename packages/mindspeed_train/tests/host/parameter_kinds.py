"""Models with every kind of parameter that tensor parallelism cuts, or copies."""

from __future__ import annotations

from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.training import SideRequest, train_rank

_LLAMA = (
    "--num-layers 2 --hidden-size 32 --normalization RMSNorm --swiglu --disable-bias-linear "
    "--position-embedding-type rope"
)
_EXPERTS = f"{_LLAMA} --num-experts 4 --moe-ffn-hidden-size 32 --moe-aux-loss-coeff 0.01"
_LATENT = (
    f"{_LLAMA} --multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 8"
)
_SINKS = f"{_LLAMA} --softmax-type learnable"
TP2, SP = "--tensor-model-parallel-size 2", "--sequence-parallel"
CP2 = "--context-parallel-size 2"

KINDS = {
    "gpt": ("--num-layers 2 --hidden-size 32", f"{TP2} {SP}"),
    "gpt, copied sequences": ("--num-layers 2 --hidden-size 32", TP2),
    "untied": (f"{_LLAMA} --untie-embeddings-and-output-weights", f"{TP2} {SP}"),
    "sinks": (_SINKS, f"{TP2} {SP}"),
    "sinks, flash attention": (f"{_SINKS} --use-flash-attn", f"{TP2} {SP}"),
    "sinks, latent": (f"{_LATENT} --softmax-type learnable --use-flash-attn", f"{TP2} {SP}"),
    "query groups": (f"{_LLAMA} --group-query-attention --num-query-groups 2 --qk-layernorm", f"{TP2} {SP}"),
    "gates": (f"{_LLAMA} --attention-output-gate", f"{TP2} {SP}"),
    "latent": (_LATENT, f"{TP2} {SP}"),
    "latent queries": (f"{_LATENT} --q-lora-rank 16 --qk-layernorm", f"{TP2} {SP}"),
    "predictions": (f"{_LLAMA} --mtp-num-layers 1", f"{TP2} {SP}"),
    "cut experts": (_EXPERTS, f"{TP2} {SP}"),
    "grouped experts": (f"{_EXPERTS} --moe-grouped-gemm", f"{TP2} {SP}"),
    "whole experts": (_EXPERTS, f"{TP2} {SP} --expert-tensor-parallel-size 1"),
    "spread experts": (
        _EXPERTS,
        f"{TP2} {SP} --expert-tensor-parallel-size 1 --expert-model-parallel-size 2 "
        "--moe-token-dispatcher-type alltoall",
    ),
    "shared experts": (
        f"{_EXPERTS} --moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate",
        f"{TP2} {SP}",
    ),
    "uneven shards": (f"{_LLAMA} --ffn-hidden-size 45", f"{TP2} {SP} --unaligned-linear"),
    "distributed optimizer": (_SINKS, f"{TP2} {SP} --use-distributed-optimizer"),
}
FOUR = {
    "sinks, ring": (_SINKS, f"{TP2} {SP} {CP2} --use-flash-attn"),
    "sinks, heads exchanged": (_SINKS, f"{TP2} {SP} {CP2} --context-parallel-algo ulysses_cp_algo"),
    "grid": (_LLAMA, "--tensor-model-parallel-size 4 --tp-2d --tp-x 2 --tp-y 2"),
    "cut and spread experts": (
        _EXPERTS,
        f"{TP2} {SP} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
    ),
    "pipeline": (f"{_SINKS} --num-layers 2", f"{TP2} {SP} --pipeline-model-parallel-size 2"),
}


def train(lines, initial):
    """One step of each line of flags, in the same processes: norm, gradients, initial parameters."""
    found = {}
    for name, flags in lines.items():
        request = SideRequest(training_flags(flags.split(), 2), 1, initial.get(name), platform="cpu")
        record = train_rank(request)
        gradients = record.gradients[0].tensors if record.gradients else None
        found[name] = record.grad_norms[0], gradients, record.initial
    return found
