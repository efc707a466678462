"""Megatron-LM's flags that are not here, each with the reason.

The flags are facts taken from a checkout (``megatron_lm_flags.json``, written by
``tools/megatron_lm_flags.py``). A rule says why a flag is not here and what to do instead. *Refused* means
that a training could want it; *not applicable*, that it belongs to another program (inference, other model
families, other launchers) or to something that does not exist here. Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

REFUSED, NOT_APPLICABLE = "refused", "not applicable"


@dataclass(frozen=True)
class Rule:
    """Reason why flags are not here.

    Attributes:
        status: `REFUSED` or `NOT_APPLICABLE`.
        reason: one sentence, with the way out where there is one.
        options: option strings; ``*`` matches anything.
    """

    status: str
    reason: str
    options: tuple[str, ...]


_NOT_APPLICABLE = {
    "inference and serving; `mindspeed-train sample` continues a prompt": (
        "--inference-* --flash-decode --symmetric-ar-type --mlp-chunks-for-prefill --max-tokens-to-oom "
        "--decode-only-cuda-graphs --nccl-all-reduce-for-prefill --*-chunked-prefill --cache-mla-latents "
        "--use-legacy-static-engine --moe-pad-experts-for-cuda-graph-inference"
    ),
    "reinforcement learning, another program": "--rl-* --grpo-* --langrl-* --perform-rl-step --refit-method",
    "BERT, T5 and retrieval models; this host trains GPT models": (
        "--bert-* --output-bert-embeddings --onnx-safe --ict-* --biencoder-* --titles-data-path "
        "--query-in-block-prob --use-one-sent-docs --evidence-data-path --retriever-* --block-data-path "
        "--embedding-path --indexer-* --encoder-num-layers --decoder-num-layers --encoder-seq-length "
        "--decoder-seq-length --mask-prob --short-seq-prob --vocab-extra-ids --relative-attention-*"
    ),
    "vision models; this host trains GPT models": (
        "--num-classes --img-h --img-w --num-channels --patch-dim --classes-fraction --no-data-sharding "
        "--data-per-class-fraction --head-lr-mult --vision-* --swin-* --mask-type --mask-factor "
        "--iter-per-epoch --dino-* --sample-rate"
    ),
    "hybrid and Mamba models need TransformerEngine's layers": "--spec --hybrid-*-ratio --mamba-*",
    "a service of NVIDIA's clusters": (
        "--one-logger-* --no-one-logger --app-tag-* --adlr-* --run-workload-inspector-server --log-energy "
        "--disable-msc --object-storage-cache-path"
    ),
    "the launcher's; `mindspeed-train --nproc N --max-restarts N` starts and restarts workers": (
        "--inprocess-* --enable-ft-package --calc-ft-timeouts --ft-*"
    ),
    "read from the environment of the launcher; do not give it": "--local-rank --lazy-mpu-init",
    "obsolete in Megatron-LM: it raises an error there": "--checkpoint-activations",
    "obsolete spelling; use --micro-batch-size": "--batch-size",
    "obsolete spelling; use --lr-warmup-fraction or --lr-warmup-iters": "--warmup",
    "obsolete spelling; use --tensor-model-parallel-size": "--model-parallel-size",
    "obsolete spelling; use --position-embedding-type none": "--no-position-embedding",
    "obsolete; models and checkpoints are always megatron-core's": (
        "--use-mcore-models --use-legacy-models --use-dist-ckpt --dist-ckpt-format --moe-extended-tp "
        "--no-async-tensor-model-parallel-allreduce --no-scatter-gather-tensors-in-pipeline"
    ),
    "checkpoints are torch_dist, always saved and loaded in parallel and checked by their manifest": (
        "--auto-detect-ckpt-format --ckpt-convert-* --no-ckpt-fully-parallel-save --ckpt-fully-parallel-* "
        "--ckpt-assume-constant-structure --use-persistent-ckpt-worker --dist-ckpt-strictness "
        "--dist-ckpt-save-pre-mcore-014 --no-strict-fsdp-dtensor-load "
        "--distrib-optim-fully-reshardable-mem-efficient"
    ),
    "the platform names the backend; choose with --platform": "--distributed-backend",
    "the vocabulary is padded by --make-vocab-size-divisible-by": "--padded-vocab-size",
    "every step runs with the current JIT settings of torch": "--disable-jit-fuser",
    "stragglers are compared at log steps, without a port to switch it": "--straggler-ctrlr-port",
    "leave out --log-straggler": "--disable-straggler-on-startup",
    "a research switch of Megatron-LM's authors": "--enable-experimental",
    "samples are tokens of documents of any length": "--hybrid-context-parallel",
}
_REFUSED = {
    "Megatron-FSDP shards over all data-parallel ranks at once here, and parameters that have "
    "memory already and are not fp8": (
        "--outer-dp-sharding-strategy --keep-fp8-transpose-cache --enable-full-sharding-in-hsdp "
        "--init-model-with-meta-device"
    ),
    "needs TransformerEngine's layers and fp8 hardware": (
        "--tp-comm-overlap-cfg --no-tp-comm-split-* --te-precision-config-file"
    ),
    "tuning of NCCL that has no counterpart on other platforms; set NCCL's environment variables": (
        "--use-nccl-ub --fsdp-manual-registration --disable-symmetric-registration --use-sharp "
        "--sharp-enabled-group --nccl-communicator-config-path --high-priority-stream-groups "
        "--use-ring-exchange-p2p --create-all-gather-group"
    ),
    "ranks are laid out tensor, context, data, pipeline; give the order to the launcher": (
        "--use-tp-pp-dp-mapping"
    ),
    "checkpoints in memory or on local disks are not written; use --async-save with --save-interval": (
        "--non-persistent-* --replication --replication-jump --replication-factor"
    ),
    "use --keep-last-n, which keeps the newest ones": "--save-retain-interval",
    "a model is described by its flags; `mindspeed-train inspect` prints those of a checkpoint": (
        "--use-checkpoint-args --use-mp-args-from-checkpoint-args "
        "--no-use-tokenizer-model-from-checkpoint-args --yaml-cfg"
    ),
    "main parameters are loaded with the optimizer state": "--load-main-params-from-ckpt",
    "--exit-duration-in-mins and --exit-interval end a phase": "--phase-transition-iterations",
    "samples are drawn in the shuffled order of the dataset; there is no other order": "--dataloader-type",
    "fill-in-the-middle and chat samples are prepared beforehand, as text for prepare-text": (
        "--fim-* --sft --sft-*"
    ),
    "the tokenizer file decides; prepare one with `mindspeed-train prepare-text`": (
        "--tiktoken-* --tokenizer-* --legacy-tokenizer --trust-remote-code --allow-ambiguous-pad-tokens"
    ),
    "the index is built once and shared by all ranks of a machine": (
        "--per-dataset-sequences-path --dataloader-fast-cache-load --dataloader-defer-npy-index-mmap "
        "--num-dataset-builder-threads --mid-level-dataset-surplus"
    ),
    "install mindspeed-profile, whose --profile records what runs and where memory goes": (
        "--use-pytorch-profiler --record-memory-history --memory-snapshot-path --log-memory-interval "
        "--log-device-memory-used"
    ),
    "a batch that goes wrong is found, named and skipped or stopped at by --bad-step-action": (
        "--rerun-mode --error-injection-* --iterations-to-skip --result-rejected-tracker-filename"
    ),
    "not recorded; a feature that wraps the stage `optimizer_step` can": (
        "--log-params-norm --save-wgrads-interval --save-dgrads-interval --dump-param-to-param-group-map "
        "--check-weight-hash-across-dp-replicas-interval"
    ),
    "the plan and metrics.jsonl record progress": "--log-progress --logging-level",
    "the loss scale is sent wherever there is one": "--no-log-loss-scale-to-tensorboard",
    "Python's garbage collector passes over what was there before the first step, which makes it short": (
        "--manual-gc --manual-gc-* --no-manual-gc-eval"
    ),
    "the device's cache is left as it is": "--empty-unused-memory-level",
    "collectives already order ranks": "--train-sync-interval",
    "workers of data loading end with the process": "--exit-signal-handler-for-dataloader",
    "give --global-batch-size and --rampup-batch-size as they are to be": "--decrease-batch-*",
    "--distributed-timeout-minutes holds for the whole run": "--distributed-timeout-seconds-after-*",
    "norms and biases carry no weight decay, as usual": "--no-weight-decay-cond-type",
    "dense weights are not turned into experts here": "--moe-upcycling-*",
    "layers of one run have one shape": "--heterogeneous-*",
    "GELU is torch's": "--openai-gelu",
    "prediction layers are on the last stage": "--mtp-standalone",
}

RULES: tuple[Rule, ...] = tuple(
    Rule(status, reason, tuple(options.split()))
    for status, table in ((NOT_APPLICABLE, _NOT_APPLICABLE), (REFUSED, _REFUSED))
    for reason, options in table.items()
)


@lru_cache(maxsize=1)
def megatron_lm_flags() -> tuple[str, tuple[Mapping[str, Any], ...]]:
    """Return the version of the checkout and the facts of each of its flags."""
    path = Path(__file__).with_name("megatron_lm_flags.json")
    table = json.loads(path.read_text(encoding="utf-8"))
    return table["version"], tuple(table["flags"])


def rule_for(option: str) -> Rule | None:
    """Return the first rule that names an option."""
    for rule in RULES:
        if any(fnmatchcase(option, pattern) for pattern in rule.options):
            return rule
    return None


def why_absent(option: str) -> str:
    """Say why one of Megatron-LM's flags is not here; nothing of flags that it does not have either."""
    if not any(option in facts["options"] for facts in megatron_lm_flags()[1]):
        return ""
    rule = rule_for(option)
    return f"Megatron-LM's flag is {rule.status} here: {rule.reason}" if rule is not None else ""
