"""Flags without which a run would train, save or read something else, each with the way out."""

from __future__ import annotations

from mindspeed_core.flags.notes import LEAVE_OUT
from mindspeed_megatron.upstream.verdicts import (
    MEGATRON_LM,
    MINDSPEED,
    MINDSPEED_LLM,
    NEWER_MEGATRON_LM,
    Verdict,
    refused,
)

OTHER_LANGUAGE_MODELS = "BERT, T5 and retrieval models are not trained here"
VISION = "vision models are not trained here"
HYBRID = "hybrid and Mamba models need TransformerEngine's layers"
REINFORCEMENT = "reinforcement learning is another program"
_MEGATRON_LM = "use Megatron-LM's scripts for it, with `import mindspeed_core.megatron_adaptor`"

REFUSED_FLAGS: tuple[Verdict, ...] = (
    *refused(
        MEGATRON_LM,
        {
            REINFORCEMENT: (
                "use Megatron-LM's train_rl.py",
                "--rl-* --grpo-* --langrl-* --perform-rl-step --refit-method",
            ),
            OTHER_LANGUAGE_MODELS: (
                "train a GPT without it",
                "--bert-* --output-bert-embeddings --onnx-safe --ict-* --biencoder-* --titles-data-path "
                "--query-in-block-prob --use-one-sent-docs --evidence-data-path --retriever-* "
                "--block-data-path --embedding-path --indexer-batch-size --indexer-log-interval "
                "--encoder-num-layers --decoder-num-layers "
                "--encoder-seq-length --decoder-seq-length --vocab-extra-ids --relative-attention-*",
            ),
            VISION: (
                "train a GPT without it",
                "--num-classes --img-h --img-w --num-channels --patch-dim --classes-fraction "
                "--data-per-class-fraction --head-lr-mult --vision-* --swin-* "
                "--mask-type --mask-factor --iter-per-epoch --dino-* --sample-rate",
            ),
            HYBRID: (
                "train a GPT without it",
                "--spec --hybrid-*-ratio --mamba-*",
            ),
            "megatron-core's model is initialized on every rank": (LEAVE_OUT, "--lazy-mpu-init"),
            "Megatron-LM raises an error for it": (
                "use --recompute-granularity full",
                "--checkpoint-activations",
            ),
            "an obsolete spelling, for which Megatron-LM raises an error": (
                "use --micro-batch-size, --lr-warmup-fraction or --lr-warmup-iters, and "
                "--tensor-model-parallel-size",
                "--batch-size --warmup --model-parallel-size",
            ),
            "the experts that it chose are in megatron-core before 0.17 alone": (
                "use --moe-grouped-gemm",
                "--moe-use-legacy-grouped-gemm",
            ),
            "an obsolete way to lay out experts": (
                "use --expert-tensor-parallel-size 1",
                "--moe-extended-tp",
            ),
            "checkpoints are converted by another program": (
                "let Megatron-LM convert it with --ckpt-convert-format torch_dist",
                "--ckpt-convert-*",
            ),
            "checkpoints are written in megatron-core's current form alone": (
                LEAVE_OUT,
                "--dist-ckpt-save-pre-mcore-014",
            ),
            "stragglers are looked for from the first step on": (
                "leave out --log-straggler",
                "--disable-straggler-on-startup",
            ),
            "samples are tokens of documents of any length": (LEAVE_OUT, "--hybrid-context-parallel"),
            "Megatron-FSDP shards over all data-parallel ranks at once here, and parameters that have "
            "memory already and are not fp8": (
                LEAVE_OUT,
                "--outer-dp-sharding-strategy --enable-full-sharding-in-hsdp --init-model-with-meta-device",
            ),
            "the recipes of precision are TransformerEngine's": (LEAVE_OUT, "--te-precision-config-file"),
            "NCCL's user buffers have no counterpart on other platforms": (
                _MEGATRON_LM,
                "--use-nccl-ub --fsdp-manual-registration",
            ),
            "checkpoints in memory or on local disks are not written": (
                "use --async-save with --save-interval",
                "--non-persistent-* --replication --replication-jump --replication-factor",
            ),
            "a tokenizer and a layout are not taken from a checkpoint": (
                "give their flags",
                "--use-mp-args-from-checkpoint-args --no-use-tokenizer-model-from-checkpoint-args",
            ),
            "flags are not read from a file while training": (
                "`mindspeed-features migrate -- --yaml-cfg FILE` prints them as flags; give those",
                "--yaml-cfg",
            ),
            "main parameters are loaded with the optimizer state": (
                "leave out it and --no-load-optim",
                "--load-main-params-from-ckpt",
            ),
            "a run has one phase": (
                "end it with --exit-interval or --exit-duration-in-mins",
                "--phase-transition-iterations",
            ),
            "fill-in-the-middle samples are not made while training": (
                "prepare them as text for `mindspeed-train prepare-text`",
                "--fim-*",
            ),
            "conversations are prepared before training": (
                "prepare them with `mindspeed-models preprocess --dataset-format` and train with "
                "--is-instruction-dataset (--pack-samples packs them)",
                "--sft --sft-*",
            ),
            "the tokenizer's file decides": (
                "prepare one with `mindspeed-train prepare-text`",
                "--tiktoken-* --tokenizer-* --trust-remote-code --allow-ambiguous-pad-tokens",
            ),
            "how many samples are drawn beforehand from each dataset of a blend is fixed": (
                LEAVE_OUT,
                "--mid-level-dataset-surplus",
            ),
            "errors are not injected, and no step is left out by its number": (
                LEAVE_OUT,
                "--error-injection-type --iterations-to-skip",
            ),
            "gradients are not written to files": (
                "a feature that wraps the stage `optimizer_step` can",
                "--save-wgrads-interval --save-dgrads-interval --dump-param-to-param-group-map",
            ),
            "sizes of batches are not adjusted": (
                "give --global-batch-size and --rampup-batch-size as they are to be",
                "--decrease-batch-*",
            ),
            "norms and biases carry no weight decay, as usual": (LEAVE_OUT, "--no-weight-decay-cond-type"),
            "dense weights are not turned into experts here": ("train from scratch", "--moe-upcycling-*"),
            "layers of one run have one shape": (LEAVE_OUT, "--heterogeneous-*"),
            "GELU is torch's": (LEAVE_OUT, "--openai-gelu"),
            "prediction layers are on the last stage": (LEAVE_OUT, "--mtp-standalone"),
        },
    ),
    *refused(
        NEWER_MEGATRON_LM,
        {
            "the installed Megatron-LM's batches grow by equal steps": (
                "use mindspeed-train, or --rampup-batch-size and --global-batch-size",
                "--step-batch-size-schedule",
            ),
            "a validation has the batch size of the training": (LEAVE_OUT, "--eval-global-batch-size"),
            HYBRID: (
                "train a GPT without it",
                "--hybrid-layer-pattern",
            ),
            "the installed megatron-core has no maximal update parametrization": (
                LEAVE_OUT,
                "--use-mup --mup-*",
            ),
            "the installed megatron-core gives every depth of prediction its own layer": (
                LEAVE_OUT,
                "--mtp-use-repeated-layer",
            ),
            "the installed megatron-core fixes the types of Megatron-FSDP's buffers": (
                LEAVE_OUT,
                "--megatron-fsdp-main-params-dtype --megatron-fsdp-main-grads-dtype "
                "--megatron-fsdp-grad-comm-dtype",
            ),
            "distillation is another program": ("use Megatron-LM's scripts for it", "--export-kd-*"),
        },
    ),
    *refused(
        MINDSPEED,
        {
            "every setting is a flag": ("write a plugin that brings its own", "--additional-config"),
            "models of several parts on different devices are not trained here": (
                LEAVE_OUT,
                "--dist-train",
            ),
            "8-bit formats need TransformerEngine's kernels or their counterpart on NPU: not here": (
                LEAVE_OUT,
                "--fp8-reuse-quantized-weight --no-use-gmm-fp8 --te-gmm-mode --te-comparison-*",
            ),
            "training with simulated quantization is not here": (LEAVE_OUT, "--qat-scheme"),
            "sparse attention (DSA) is not here; its indexer and the loss of that are operators": (
                LEAVE_OUT,
                "--apply-rope-in-complex --use-dsa-absorb --use-fused-lightning-indexer* "
                "--use-fused-sparse-flash-attention",
            ),
            "linear attention (gated delta net) is not here": (LEAVE_OUT, "--use-naive-l2norm"),
            "results that do not depend on the batch are not promised": (
                LEAVE_OUT,
                "--use-batch-invariant-ops --use-flash-attn-npu-batch-invariant",
            ),
            "one framework: torch": (LEAVE_OUT, "--ai-framework"),
            "multimodal models are not here, so nothing searches for their layouts": (
                "use --auto-settings for a language model",
                "--auto-parallel-mm --simulated-nnodes --simulated-nproc-per-node",
            ),
            "switches of the search's own measuring runs, which are not the user's to set": (
                LEAVE_OUT,
                "--auto-parallel-profile --profile-memory --profile-operator",
            ),
            "it belongs to the launcher": (
                "give it to torchrun, or use mindspeed-train --nproc",
                "--nproc-per-node --nnodes --node-rank --master-addr --master-port",
            ),
            "averaged weights are kept by an optimizer, of the package mindspeed-optim": (
                "use --optimizer-selection fused_ema_adamw",
                "--use-ema",
            ),
            "parameters are sharded over all data-parallel ranks, and not over groups of them": (
                "use --use-torch-fsdp2",
                "--enable-zero3 --layerzero*",
            ),
            "attention has biases without --disable-bias-linear, or in query, key and value alone with "
            "--add-qkv-bias": ("use one of these", "--add-dense-bias"),
        },
    ),
    *refused(
        MINDSPEED_LLM,
        {
            "preferences are not trained here": ("train on answers alone", "--is-pairwise-dataset --dpo-*"),
            "weights are written in another format after a training": (
                "export them with `mindspeed-models export`",
                "--enable-mg2hf-convert --hf-cfg-dir",
            ),
            "Megatron-LM's scripts do not take the constants of yarn": (
                "use mindspeed-train",
                "--beta-fast --beta-slow --original-max-position-embeddings",
            ),
            "layers that predict further tokens are the model's own": (LEAVE_OUT, "--mtp-spec"),
            "sparse attention with an indexer is not here": (
                LEAVE_OUT,
                "--enable-dsa-indexer --use-sparse-flash-attn --index-* --indexer-loss-coeff "
                "--apply-rope-no-in-complex --no-use-sparse-c8-indexer --kv-compress --compress-ratios "
                "--compress-rope-theta",
            ),
            "gated delta nets are not here": (
                LEAVE_OUT,
                "--full-attention-interval --use-triton-gdn --no-enable-linear-qkv",
            ),
            "Mamba layers are not here": (LEAVE_OUT, "--mamba-d-conv --mamba-expand --mamba-chunk-size"),
            "hyper-connections are not here": (
                LEAVE_OUT,
                "--enable-mhc --use-fused-mhc --use-triton-mhc --hc-mult",
            ),
            "this part of a model is not here": (
                LEAVE_OUT,
                "--rmsnorm-weight-in-fp32 --init-norm-weight-in-fp32 --gelu-tanh --post-norm "
                "--query-pre-attn-scalar "
                "--output-logit-softcapping --interleave-sliding-window --input-embeds-norm "
                "--sliding-window-size --o-lora-rank --o-groups --n-hash-layers --num-zero-experts "
                "--enable-mla-scale-* --longrope-freqs-type --long-factor --short-factor --long-mscale "
                "--short-mscale --add-output-layer-bias --fc-type --original-seq-len --rope-factor",
            ),
        },
    ),
)
