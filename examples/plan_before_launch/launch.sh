#!/bin/sh
# A LLaMA2-70B training on 1,024 NPUs. With PLAN=1 it is planned on this machine instead of started:
#   PLAN=1 sh launch.sh
set -e
FLAGS="--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64
  --group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096
  --vocab-size 32000 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
  --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --bf16 --mock-data
  --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 8
  --use-distributed-optimizer --micro-batch-size 1 --global-batch-size 512 --train-iters 1000 --lr 1e-4"
LAUNCH="torchrun --nnodes 128 --nproc-per-node 8 -m mindspeed_core.train $FLAGS"
# shellcheck disable=SC2086
if [ -n "$PLAN" ]; then
  exec mindspeed-tune plan --plan-hardware ascend-910b --plan-out plan -- $LAUNCH
fi
# shellcheck disable=SC2086
exec $LAUNCH
