"""The flags that describe a model, its parallelism, its training and its batches, in every host.

Spelling, defaults and meaning are Megatron-LM's, so that a feature finds what it requires (``--normalization
RMSNorm``) whichever host it runs in. Data only: no torch.
"""

from __future__ import annotations

from dataclasses import replace

from mindspeed_core.feature import Flag
from mindspeed_megatron.config_flags import generated_flags
from mindspeed_megatron.fully_sharded.flags import FULLY_SHARDED_FLAGS


def grouped(name: str, *flags: Flag) -> tuple[Flag, ...]:
    """Return flags under one heading of ``--help``."""
    return tuple(replace(flag, group=name) for flag in flags)


_MODEL = grouped(
    "model",
    Flag("--num-layers", type=int, help="Transformer layers."),
    Flag("--hidden-size", type=int, help="Width of the hidden state."),
    Flag(
        "--ffn-hidden-size", type=int, help="Width of the MLP; by default 4 x hidden (8/3 x with --swiglu)."
    ),
    Flag("--num-attention-heads", type=int, help="Query heads."),
    Flag("--kv-channels", type=int, help="Width of a head; by default hidden / heads."),
    Flag("--group-query-attention", help="Share key and value heads between query heads."),
    Flag("--num-query-groups", type=int, default=1, help="Key and value heads with --group-query-attention."),
    Flag("--max-position-embeddings", type=int, help="Longest sequence; by default --seq-length."),
    Flag(
        "--position-embedding-type",
        type=str,
        default="learned_absolute",
        choices=("learned_absolute", "rope", "none"),
        help="Position embedding.",
    ),
    Flag("--rotary-base", type=int, default=10000, help="Base of the rotary frequencies."),
    Flag("--rotary-percent", type=float, default=1.0, help="Share of a head that is rotated."),
    Flag("--rotary-interleaved", help="Rotate neighbouring channels instead of halves."),
    Flag("--rotary-seq-len-interpolation-factor", type=int, help="Stretch positions by this factor."),
    Flag("--make-vocab-size-divisible-by", type=int, default=128, help="Pad the vocabulary to a multiple."),
    Flag("--vocab-size", type=int, help="Vocabulary before padding; by default the tokenizer's."),
    Flag(
        "--normalization",
        type=str,
        default="LayerNorm",
        choices=("LayerNorm", "RMSNorm"),
        help="Normalization of hidden states.",
    ),
    Flag("--norm-epsilon", type=float, default=1e-5, help="Epsilon of the normalization."),
    Flag("--apply-layernorm-1p", help="Store norm weights minus one (zero-centred gamma)."),
    Flag("--qk-layernorm", help="Normalize query and key per head."),
    Flag("--swiglu", help="SwiGLU activation in the MLP."),
    Flag("--squared-relu", help="Squared ReLU activation in the MLP."),
    Flag("--disable-bias-linear", inverts="add_bias_linear", help="No biases in linear layers."),
    Flag("--add-qkv-bias", help="Bias in the qkv projection even with --disable-bias-linear."),
    Flag(
        "--untie-embeddings-and-output-weights",
        help="Separate weights for the embedding and the output layer.",
    ),
    Flag("--attention-dropout", type=float, default=0.1, help="Dropout of attention probabilities."),
    Flag("--hidden-dropout", type=float, default=0.1, help="Dropout of hidden states."),
    Flag("--init-method-std", type=float, default=0.02, help="Standard deviation of initial weights."),
    Flag("--apply-query-key-layer-scaling", help="Scale attention scores by the layer number."),
    Flag("--attention-softmax-in-fp32", help="Softmax of attention in float32."),
    Flag("--fp32-residual-connection", help="Residual stream in float32."),
    Flag("--bf16", help="Train in bfloat16 with float32 main parameters."),
    Flag(
        "--transformer-impl",
        type=str,
        default="local",
        choices=("local", "transformer_engine"),
        help="Layers: megatron-core's own, or TransformerEngine's (CUDA, where it is installed).",
    ),
    Flag("--use-cpu-initialization", help="Initialize weights on the CPU, the same for every tp size."),
    Flag(
        "--recompute-granularity",
        type=str,
        choices=("full", "selective"),
        help="Recompute activations in backward.",
    ),
    Flag(
        "--recompute-method",
        type=str,
        choices=("uniform", "block"),
        help="Which layers full recompute covers.",
    ),
    Flag("--recompute-num-layers", type=int, help="Layers per unit (uniform) or recomputed layers (block)."),
    Flag("--no-bias-gelu-fusion", inverts="bias_gelu_fusion", help="Do not fuse bias and GELU."),
    Flag("--no-bias-swiglu-fusion", inverts="bias_swiglu_fusion", help="Do not fuse bias and SwiGLU."),
    Flag("--no-bias-dropout-fusion", inverts="bias_dropout_fusion", help="Do not fuse bias and dropout."),
)

_PARALLEL = grouped(
    "parallelism",
    Flag("--tensor-model-parallel-size", type=int, default=1, help="Ranks that share each layer."),
    Flag("--pipeline-model-parallel-size", type=int, default=1, help="Pipeline stages."),
    Flag(
        "--num-layers-per-virtual-pipeline-stage",
        type=int,
        help="Interleaved pipeline: layers per model chunk.",
    ),
    Flag("--sequence-parallel", help="Shard norms and dropout along the sequence over the tp ranks."),
    Flag("--context-parallel-size", type=int, default=1, help="Ranks that share each sequence."),
    Flag("--use-distributed-optimizer", help="Shard the optimizer state over data parallelism."),
    Flag("--overlap-grad-reduce", help="Reduce gradients while backward runs."),
    Flag("--overlap-param-gather", help="Gather updated parameters while forward runs."),
    Flag("--no-align-grad-reduce", inverts="align_grad_reduce", help="Let stages launch reductions freely."),
    Flag("--no-align-param-gather", inverts="align_param_gather", help="Let stages launch gathers freely."),
    Flag("--ddp-bucket-size", type=int, help="Parameters per gradient bucket."),
    Flag("--accumulate-allreduce-grads-in-fp32", help="Accumulate and reduce gradients in float32."),
    Flag(
        "--no-overlap-p2p-communication",
        inverts="overlap_p2p_comm",
        help="Interleaved pipeline: do not overlap sends with computation.",
    ),
    Flag(
        "--variable-seq-lengths",
        help="Send the shape of every micro-batch between pipeline stages; lengths may differ.",
    ),
    Flag(
        "--distributed-timeout-minutes",
        type=float,
        default=10,
        help="How long ranks wait for each other: at the start, and in collectives.",
    ),
    *FULLY_SHARDED_FLAGS,
)

_TRAINING = grouped(
    "training",
    Flag("--micro-batch-size", type=int, help="Samples per micro-batch and rank."),
    Flag("--global-batch-size", type=int, help="Samples per step; by default micro-batch x data-parallel."),
    Flag("--seq-length", type=int, help="Tokens per sample."),
    Flag(
        "--rampup-batch-size",
        type=int,
        nargs=3,
        metavar="N",
        help="Ramp up the batch: start size, increment, samples until --global-batch-size is reached.",
    ),
    Flag(
        "--step-batch-size-schedule",
        type=str,
        nargs="+",
        metavar="TOKENS:SIZE",
        help="Samples per step from given tokens on (K, M, B, T), in place of --global-batch-size.",
    ),
    Flag("--train-iters", type=int, help="Steps of the whole run."),
    Flag("--train-samples", type=int, help="Samples of the whole run, instead of --train-iters."),
    Flag("--skip-train", help="Train nothing: load, validate and test."),
    Flag("--full-validation", help="Validate on all validation data instead of --eval-iters batches."),
    Flag("--multiple-validation-sets", help="One loss per dataset of --valid-data-path, no blend."),
    Flag("--eval-interval", type=int, default=1000, help="Steps between validations."),
    Flag("--eval-iters", type=int, default=100, help="Batches per validation; 0 for none."),
    Flag("--exit-interval", type=int, help="Save and end after a step divisible by this."),
    Flag("--seed", type=int, default=1234, help="Seed of every random number generator."),
    Flag("--data-parallel-random-init", help="Different initial weights on data-parallel ranks."),
    Flag("--calculate-per-token-loss", help="Average gradients over tokens instead of micro-batches."),
    Flag(
        "--no-check-for-nan-in-loss-and-grad",
        inverts="check_for_nan_in_loss_and_grad",
        help="Do not stop when a loss or gradient is not finite.",
    ),
)

_OPTIMIZER = grouped(
    "optimizer and schedule",
    Flag("--optimizer", type=str, default="adam", choices=("adam", "sgd"), help="Optimizer."),
    Flag("--lr", type=float, help="Peak learning rate."),
    Flag("--min-lr", type=float, default=0.0, help="Learning rate at the end of the decay."),
    Flag(
        "--lr-decay-style",
        type=str,
        default="linear",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
        help="Shape of the decay.",
    ),
    Flag("--lr-decay-iters", type=int, help="Steps of the decay; by default --train-iters."),
    Flag("--lr-decay-samples", type=int, help="Samples of the decay; by default --train-samples."),
    Flag("--lr-warmup-iters", type=int, default=0, help="Steps of linear warm-up."),
    Flag("--lr-warmup-samples", type=int, default=0, help="Samples of linear warm-up."),
    Flag("--lr-warmup-fraction", type=float, help="Share of the decay steps used for warm-up."),
    Flag("--lr-warmup-init", type=float, default=0.0, help="Learning rate at the start of the warm-up."),
    Flag(
        "--lr-wsd-decay-style",
        type=str,
        default="exponential",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
        help="Shape of the last phase of WSD.",
    ),
    Flag("--lr-wsd-decay-iters", type=int, help="Steps of the last phase of WSD."),
    Flag("--lr-wsd-decay-samples", type=int, help="Samples of the last phase of WSD."),
    Flag("--weight-decay", type=float, default=0.01, help="Weight decay."),
    Flag("--start-weight-decay", type=float, help="Weight decay at the start, when it changes."),
    Flag("--end-weight-decay", type=float, help="Weight decay at the end, when it changes."),
    Flag(
        "--weight-decay-incr-style",
        type=str,
        default="constant",
        choices=("constant", "linear", "cosine"),
        help="How the weight decay changes.",
    ),
    Flag("--clip-grad", type=float, default=1.0, help="Largest gradient norm; 0 for no clipping."),
    Flag("--adam-beta1", type=float, default=0.9, help="Decay of Adam's first moment."),
    Flag("--adam-beta2", type=float, default=0.999, help="Decay of Adam's second moment."),
    Flag("--adam-eps", type=float, default=1e-8, help="Epsilon of Adam."),
    Flag("--sgd-momentum", type=float, default=0.9, help="Momentum of SGD."),
    Flag("--log-num-zeros-in-grad", help="Count the zeros in the gradient."),
    Flag(
        "--override-opt-param-scheduler",
        aliases=("--override-opt_param-scheduler",),
        help="On resume, take the schedule from the flags instead of the checkpoint.",
    ),
    Flag(
        "--use-checkpoint-opt-param-scheduler",
        aliases=("--use-checkpoint-opt_param-scheduler",),
        help="On resume, take the schedule from the checkpoint.",
    ),
)

BATCH_FLAGS = grouped(
    "data",
    Flag("--reset-position-ids", help="Restart positions after each end-of-document token."),
    Flag("--reset-attention-mask", help="No attention across end-of-document tokens."),
    Flag("--eod-mask-loss", help="No loss on end-of-document tokens."),
    Flag(
        "--create-attention-mask-in-dataloader",
        help="Let the dataset build a dense attention mask; otherwise attention is causal.",
    ),
    Flag(
        "--no-create-attention-mask-in-dataloader",
        inverts="create_attention_mask_in_dataloader",
        default=False,
        help="Accepted; no dense mask is the default.",
    ),
)
"""Flags of batches: they decide whether attention gets a mask, and over what."""

_ACCEPTED = "Accepted; local layers have no such kernel."

MODEL_FLAGS = (
    *grouped(
        "model",
        Flag("--use-rope-scaling", help="Scale the rotary frequencies as Llama 3.1 does."),
        Flag("--rope-scaling-factor", type=float, default=8.0, help="Factor of --use-rope-scaling."),
        Flag("--use-rotary-position-embeddings", help="Older spelling of --position-embedding-type rope."),
        Flag(
            "--multi-latent-attention",
            aliases=("--multi-head-latent-attention",),
            help="Attention over keys and values of low rank (MLA).",
        ),
        Flag("--quick-geglu", help="Gated quick GELU activation in the MLP."),
        Flag("--init-method-xavier-uniform", help="Xavier uniform initial weights."),
        Flag(
            "--fp16-lm-cross-entropy",
            help="Compute the loss from float16 logits without converting them to float32.",
        ),
        Flag("--recompute-activations", help="Older spelling of --recompute-granularity selective."),
        Flag("--no-masked-softmax-fusion", help=_ACCEPTED),
        Flag("--no-rope-fusion", help=_ACCEPTED),
        Flag("--no-persist-layer-norm", help=_ACCEPTED),
        Flag("--no-gradient-accumulation-fusion", help=_ACCEPTED),
        Flag(
            "--hybrid-override-pattern",
            type=str,
            help="Layers of a Mamba or hybrid model, one letter each; refused, their kernels are missing.",
        ),
        Flag("--is-hybrid-model", help="A model of Mamba and attention layers; refused."),
        Flag(
            "--heterogeneous-layers-config-path",
            type=str,
            per_rank=True,
            help="Layers that differ from each other, from a file; refused.",
        ),
        Flag("--moe-use-upcycling", help="Turn a dense checkpoint into experts; refused."),
    ),
    *grouped(
        "parallelism",
        Flag(
            "--num-virtual-stages-per-pipeline-rank",
            type=int,
            help="Interleaved pipeline: model chunks per rank.",
        ),
        Flag(
            "--ddp-num-buckets",
            type=int,
            help="Gradient buckets of --overlap-grad-reduce, which decide the size of one in place of "
            "--ddp-bucket-size.",
        ),
        Flag("--grad-reduce-in-bf16", help="Reduce gradients in bfloat16 under --bf16."),
    ),
)
"""Flags of no field of a megatron-core configuration: they choose functions or arguments of the model class,
are older spellings, or ask for what is refused with a reason."""

TRAINING_FLAGS = (*_MODEL, *_PARALLEL, *_TRAINING, *_OPTIMIZER)


def describing_flags() -> tuple[Flag, ...]:
    """Return the flags that describe a model, its parallelism, its optimizer and its batches."""
    written = (*TRAINING_FLAGS, *BATCH_FLAGS, *MODEL_FLAGS)
    # Timers belong to a training program.
    generated = (flag for flag in generated_flags(written) if flag.dest != "barrier_with_L1_time")
    return (*written, *generated)
