"""The rank of each page in the search, and words that users type and its headings do not have.

The theme ranks a word of a heading a thousand times above one of the text. Without this, pages that list
everything, and there are many, would stand before the page that explains it.
"""

from __future__ import annotations

from typing import Any

EVIDENCE = ("source/", "proofs/", "reading/")
"""Pages that show files, results and pictures of pages: out of the search."""
LISTS = ("reference/", "changelog.")
"""Generated pages and lists: last, below the text of any guide."""
GUIDE, FEATURE, CHINESE, LIST = 4.0, 1.0, 0.5, 0.001
"""Weights of the pages; Chinese words are found in Chinese pages alone, whatever these weigh."""

WORDS: dict[str, tuple[str, ...]] = {
    "quick-start.md": ("install", "tutorial", "example"),
    "training.md": ("launch", "bf16", "precision", "batch size", "learning rate"),
    "data.md": ("dataset", "tokenizer", "jsonl", "blend"),
    "finetuning.md": ("finetune", "finetuning", "sft", "instruction"),
    "checkpoints.md": ("resume", "save", "load", "restart", "reshard"),
    "fault-tolerance.md": ("nan", "hang", "crash", "signal", "preemption", "restart"),
    "monitoring.md": ("throughput", "mfu", "tokens per second", "tensorboard", "wandb", "log"),
    "clusters.md": ("slurm", "kubernetes", "multi-node"),
    "planning.md": ("oom", "out of memory", "memory estimate"),
    "tuning.md": ("search", "autotune", "layout"),
    "fully-sharded.md": ("fsdp", "fsdp2", "zero3"),
    "dry-runs.md": ("fake", "dry run"),
    "models.md": ("llama", "qwen", "gqa", "architecture of a model"),
    "migration.md": ("migrate", "mindspeed", "import"),
    "megatron-lm.md": ("pretrain_gpt", "megatron"),
    "library-sessions.md": ("activate", "own loop", "trainer"),
    "architecture.md": ("hook", "stage", "resolver"),
    "writing-a-plugin.md": ("plugin", "feature of your own"),
    "npu-first-run.md": ("npu", "ascend", "cann"),
    "gpu.md": ("cuda", "gpu", "nvidia"),
    "programs.md": ("doctor", "command", "terminal"),
    "faq.md": ("error", "question", "help"),
    "features/mindspeed-cp/context-parallel.md": ("ring", "ulysses", "long sequence", "zig-zag"),
    "features/mindspeed-pp/pp-engine.md": ("pipeline", "bubble", "1f1b", "zero bubble", "schedule"),
    "features/mindspeed-memory/swap-attention.md": ("offload", "swap", "host memory"),
    "features/mindspeed-memory/recompute-activation.md": ("recompute", "checkpointing"),
    "features/mindspeed-kernels/flash-attn.md": ("flash attention", "sdpa"),
    "features/mindspeed-models/lora.md": ("peft", "adapter", "finetune"),
    "features/mindspeed-optim/opt-muon.md": ("muon",),
    "features/mindspeed-profile/profile.md": ("profiler", "trace", "timeline"),
    "packages/mindspeed-moe.md": ("moe", "expert", "mixture of experts"),
    "packages/mindspeed-models.md": ("hugging face", "convert", "safetensors"),
    "packages/mindspeed-memory.md": ("memory",),
    "checkpoints.zh-CN.md": ("恢复", "检查点"),
    "data.zh-CN.md": ("数据", "分词器"),
    "fault-tolerance.zh-CN.md": ("故障", "容错"),
}
"""Page in the site: words for it."""


def search_meta(uri: str) -> dict[str, Any]:
    """Return what the search shall know of a page, as the theme's front matter has it."""
    if uri.startswith(EVIDENCE):
        return {"search": {"exclude": True}}
    if uri.startswith(LISTS):
        weight = LIST
    elif uri.endswith(".zh-CN.md"):
        weight = CHINESE
    else:
        weight = FEATURE if uri.startswith(("features/", "packages/")) else GUIDE
    found: dict[str, Any] = {"search": {"boost": weight}}
    if uri in WORDS:
        found["tags"] = list(WORDS[uri])
    return found
