"""A chain of steps from text to an exported model, and what transformers computes with its end."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from corpora import question, text, write_lines
from safetensors.torch import load_file

from mindspeed_models.program import main

STEPS = ("convert", "preprocess", "pretrain", "finetune", "lora", "merge", "export")


def run_chain(work: Path, name: str, steps: tuple[str, ...] = STEPS, nproc: int = 2) -> Path:
    """Run steps for a model on made-up texts and questions; returns the folder."""
    corpus, instructions = work / "texts.jsonl", work / "questions.jsonl"
    if not corpus.exists():
        write_lines(corpus, [{"text": text(number, 60)} for number in range(200)])
        write_lines(instructions, [question(number) for number in range(64)])
    shared = ("--work-dir", str(work), "--platform", "cpu", "--nproc", str(nproc))
    sources = ("--corpus", str(corpus), "--instructions", str(instructions))
    for step in steps:
        assert main(["run", name, step, *shared, *sources]) == 0, step
    return work


def logits_of_export(folder: Path) -> tuple[torch.Tensor, float]:
    """Return the logits of an exported model and the largest of them; token ids go to ``reference.pt``."""
    config = json.loads((folder / "config.json").read_text())
    ids = torch.randint(3, config["vocab_size"], (2, 16), generator=torch.Generator().manual_seed(1))
    model = _model(folder, config).eval()
    with torch.no_grad():
        logits = model(ids).logits
    torch.save({"ids": ids, "logits": logits}, folder / "reference.pt")
    return logits, float(logits.abs().max())


def _model(folder: Path, config: dict) -> torch.nn.Module:
    import transformers

    kind = config["model_type"]
    if kind in ("llama", "bloom"):
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
    # Families without a class compute what LLaMA does, but for the parts that are changed here.
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "W_pack" in name]:
        for letter, part in zip("qkv", tensors.pop(name).chunk(3)):
            tensors[name.replace("W_pack", f"{letter}_proj")] = part.contiguous()
    if config.get("normalized_head"):
        tensors["lm_head.weight"] = torch.nn.functional.normalize(tensors["lm_head.weight"], dim=-1)
    known = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
    made = transformers.LlamaConfig(**known, attention_bias=kind == "internlm")
    made._attn_implementation = "eager"
    model = transformers.LlamaForCausalLM(made)
    model.load_state_dict(tensors, strict=True)
    return model.float()
