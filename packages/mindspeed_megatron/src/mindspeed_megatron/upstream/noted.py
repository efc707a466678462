"""Flags that change nothing here: what they ask for is the case anyway, or has no counterpart.

Leaving one of them out trains, saves and reads the same; at most it takes other time or memory, or writes
other lines into a log, and the reason says so.
"""

from __future__ import annotations

from mindspeed_megatron.upstream.verdicts import (
    MEGATRON_LM,
    MINDSPEED,
    MINDSPEED_LLM,
    NEWER_MEGATRON_LM,
    Verdict,
    noted,
)

NOTED_FLAGS: tuple[Verdict, ...] = (
    *noted(
        MEGATRON_LM,
        {
            "models are always megatron-core's": "--use-mcore-models",
            "the same GPT is built from megatron-core, and its checkpoints are megatron-core's": (
                "--use-legacy-models"
            ),
            "the platform names the backend; choose with --platform": "--distributed-backend",
            "checkpoints are always megatron-core's, in the format torch_dist": (
                "--use-dist-ckpt --dist-ckpt-format"
            ),
            "obsolete in Megatron-LM, and always so": (
                "--no-async-tensor-model-parallel-allreduce --no-scatter-gather-tensors-in-pipeline"
            ),
            "every rank writes and reads its own part, and files are checked against the manifest": (
                "--no-ckpt-fully-parallel-save --ckpt-fully-parallel-* --ckpt-assume-constant-structure "
                "--dist-ckpt-strictness --no-strict-fsdp-dtensor-load "
                "--distrib-optim-fully-reshardable-mem-efficient"
            ),
            "the format of a checkpoint is read from the checkpoint": "--auto-detect-ckpt-format",
            "--async-save has a writer of its own": "--use-persistent-ckpt-worker",
            "inference and serving, which a training does not do; `mindspeed-train sample` continues a "
            "prompt": (
                "--inference-* --flash-decode --symmetric-ar-type --mlp-chunks-for-prefill "
                "--max-tokens-to-oom --decode-only-cuda-graphs --nccl-all-reduce-for-prefill "
                "--*-chunked-prefill --cache-mla-latents --use-legacy-static-engine "
                "--moe-pad-experts-for-cuda-graph-inference"
            ),
            "datasets of BERT and T5 read it; one of a GPT does not": "--short-seq-prob --mask-prob",
            "a service of NVIDIA's clusters": (
                "--one-logger-* --no-one-logger --app-tag-* --adlr-* --run-workload-inspector-server "
                "--disable-msc --object-storage-cache-path"
            ),
            "the launcher's; `mindspeed-train --nproc N --max-restarts N` starts and restarts workers": (
                "--inprocess-* --enable-ft-package --calc-ft-timeouts --ft-*"
            ),
            "read from the environment of the launcher": "--local-rank",
            "every step runs with the current JIT settings of torch": "--disable-jit-fuser",
            "stragglers are compared at log steps, without a port to switch it": "--straggler-ctrlr-port",
            "a switch of Megatron-LM's authors; what is experimental has a flag of its own": (
                "--enable-experimental"
            ),
            "tuning of NCCL; set NCCL's environment variables": (
                "--disable-symmetric-registration --use-sharp --sharp-enabled-group "
                "--nccl-communicator-config-path --high-priority-stream-groups --use-ring-exchange-p2p "
                "--create-all-gather-group"
            ),
            "tuning of kernels of TransformerEngine": (
                "--tp-comm-overlap-cfg --no-tp-comm-split-* --keep-fp8-transpose-cache"
            ),
            "the index is built once and shared by all ranks of a machine": (
                "--per-dataset-sequences-path --dataloader-fast-cache-load "
                "--dataloader-defer-npy-index-mmap --num-dataset-builder-threads"
            ),
            "the tokenizer's file is read, and gives the same tokens": "--legacy-tokenizer",
            "nothing is profiled by it; install mindspeed-profile, whose --profile records what runs": (
                "--use-pytorch-profiler"
            ),
            "a step that goes wrong is found, named and skipped or stopped at by --bad-step-action": (
                "--rerun-mode --result-rejected-tracker-filename"
            ),
            "the plan, the log and metrics.jsonl record progress": "--log-progress --logging-level",
            "the loss scale is sent wherever there is one": "--no-log-loss-scale-to-tensorboard",
            "every step ends when the device has done it": "--train-sync-interval",
            "the device's cache is left as it is": "--empty-unused-memory-level",
            "workers of data loading end with the process": "--exit-signal-handler-for-dataloader",
            "--distributed-timeout-minutes holds for the whole run": (
                "--distributed-timeout-seconds-after-*"
            ),
        },
    ),
    *noted(
        MEGATRON_LM,
        {"each data-parallel rank is sharded over, as without it": "--outer-dp-sharding-strategy"},
        values=("no_shard",),
    ),
    *noted(
        MEGATRON_LM,
        {
            "errors are injected by no other flag, and those that Megatron-LM repeats change no number": (
                "--error-injection-type"
            )
        },
        values=("transient_error", "correct_result"),
    ),
    *noted(MEGATRON_LM, {"it is read with --error-injection-type alone": "--error-injection-rate"}),
    *noted(
        NEWER_MEGATRON_LM,
        {
            "main parameters and gradients are float32 unless --grad-reduce-in-bf16 is given": (
                "--megatron-fsdp-main-params-dtype --megatron-fsdp-main-grads-dtype "
                "--megatron-fsdp-grad-comm-dtype"
            )
        },
        values=("fp32",),
    ),
    *noted(
        NEWER_MEGATRON_LM,
        {
            "files are always checked against the manifest": "--verify-integrity",
            "--async-save has a writer of its own": "--async-strategy --async-ckpt-use-cpu-shm",
            "every rank writes and reads its own part, and files are checked against the manifest": (
                "--no-ckpt-load-validate-sharding-integrity --ckpt-drop-redundant-extra-state "
                "--ckpt-pg-tensors-cache-*"
            ),
            "no graphs are captured": "--cuda-graph-modules",
            "the layout of Muon's layer-wise optimizer": "--no-use-layer-wise-param-layout",
            "tuning of the flexible dispatcher": "--moe-flex-dispatcher-num-sms",
            "fused operations of TransformerEngine, which compute the same": (
                "--use-transformer-engine-op-fuser --use-grouped-gemm-for-dense-mlp "
                "--use-grouped-gemm-for-shared-expert --moe-single-grouped-weight --moe-single-grouped-bias "
                "--mla-down-proj-fusion"
            ),
            "layers are always TransformerEngine's or megatron-core's own": "--export-te-mcore-model",
        },
    ),
    *noted(
        MINDSPEED,
        {
            "biases are added where megatron-core adds them": "--skip-bias-add",
            "torch_npu's own default; set it with `torch.npu.set_compile_mode`": "--jit-compile",
            "priority of traffic is the network's to set": "--aiqos*",
            "a job goes on from its last checkpoint with --max-restarts, and --hang-timeout-minutes finds "
            "ranks that hang": "--ttp-*",
            "`tokenizer.json` is read by the fast library; there is no slow one": "--tokenizer-not-use-fast",
            "how caches and indices are shared is found out": "--no-shared-storage",
            "buckets of gradients are padded as megatron-core pads them; no number depends on it": (
                "--param-and-grad-buffer-pad"
            ),
            "parameters are gathered in the order in which megatron-core built its buckets; no number "
            "depends on it": "--reset-bucket-group-order",
        },
    ),
    *noted(MINDSPEED, {"one framework: torch": "--ai-framework"}, values=("pytorch", "torch")),
    *noted(
        MINDSPEED,
        {"megatron-core's Adam computes the same": "--optimizer-selection"},
        values=("fused_torch_adamw", "fused_adamw"),
    ),
    *noted(
        MINDSPEED_LLM,
        {"megatron-core's default of latent attention": "--beta-fast"},
        values=("32", "32.0"),
    ),
    *noted(
        MINDSPEED_LLM,
        {"megatron-core's default of latent attention": "--beta-slow"},
        values=("1", "1.0"),
    ),
    *noted(
        MINDSPEED_LLM,
        {"megatron-core's default of latent attention": "--original-max-position-embeddings"},
        values=("4096",),
    ),
    *noted(
        MINDSPEED_LLM,
        {
            "latent attention is computed by megatron-core's layers, with the same result; it may take "
            "other time and memory": (
                "--mla-mm-split --mla-up-proj-tp-overlap --mla-zero-memory --mla-fa-without-pad "
                "--mla-fa-divide-qk --mla-swap-core-attn-out --recompute-mla-up-proj "
                "--enable-mla-absorb"
            ),
            "logits of predicted tokens are computed in one piece, which takes more memory": (
                "--mtp-mem-efficient-logits"
            ),
        },
    ),
)
