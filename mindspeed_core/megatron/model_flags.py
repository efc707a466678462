"""Flags of the model and its parallelism that are no field of a megatron-core configuration.

Some choose functions or arguments of the model class, some are older spellings, some ask for what this host
refuses with a reason. The fields themselves become flags in `config_flags`.
"""

from __future__ import annotations

from mindspeed_core.feature import Flag

_MODEL = "model"
_PARALLEL = "parallelism"
_ACCEPTED = "Accepted; local layers have no such kernel."

MODEL_FLAGS: tuple[Flag, ...] = (
    Flag("--use-rope-scaling", help="Scale the rotary frequencies as Llama 3.1 does.", group=_MODEL),
    Flag(
        "--rope-scaling-factor", type=float, default=8.0, help="Factor of --use-rope-scaling.", group=_MODEL
    ),
    Flag(
        "--use-rotary-position-embeddings",
        help="Older spelling of --position-embedding-type rope.",
        group=_MODEL,
    ),
    Flag("--quick-geglu", help="Gated quick GELU activation in the MLP.", group=_MODEL),
    Flag("--init-method-xavier-uniform", help="Xavier uniform initial weights.", group=_MODEL),
    Flag(
        "--fp16-lm-cross-entropy",
        help="Compute the loss from float16 logits without converting them to float32.",
        group=_MODEL,
    ),
    Flag(
        "--recompute-activations", help="Older spelling of --recompute-granularity selective.", group=_MODEL
    ),
    Flag("--no-masked-softmax-fusion", help=_ACCEPTED, group=_MODEL),
    Flag("--no-rope-fusion", help=_ACCEPTED, group=_MODEL),
    Flag("--no-persist-layer-norm", help=_ACCEPTED, group=_MODEL),
    Flag("--no-gradient-accumulation-fusion", help=_ACCEPTED, group=_MODEL),
    Flag(
        "--num-virtual-stages-per-pipeline-rank",
        type=int,
        help="Interleaved pipeline: model chunks per rank.",
        group=_PARALLEL,
    ),
    Flag(
        "--ddp-num-buckets",
        type=int,
        help="Gradient buckets of --overlap-grad-reduce, which decide the size of one in place of "
        "--ddp-bucket-size.",
        group=_PARALLEL,
    ),
    Flag("--grad-reduce-in-bf16", help="Reduce gradients in bfloat16 under --bf16.", group=_PARALLEL),
    Flag(
        "--hybrid-override-pattern",
        type=str,
        help="Layers of a Mamba or hybrid model, one letter each; refused, their kernels are missing.",
        group=_MODEL,
    ),
    Flag("--is-hybrid-model", help="A model of Mamba and attention layers; refused.", group=_MODEL),
    Flag(
        "--heterogeneous-layers-config-path",
        type=str,
        per_rank=True,
        help="Layers that differ from each other, from a file; refused.",
        group=_MODEL,
    ),
    Flag("--moe-use-upcycling", help="Turn a dense checkpoint into experts; refused.", group=_MODEL),
)
