"""Adapters beside other programs and layouts: how far apart their numbers are.

Six layouts against one process (largest relative error of losses, gradients and parameters, at most 1e-4);
logits of a peft directory here and in peft, of adapters trained here in peft, and of the merged model in
transformers (each at most 1e-5 of the largest logit). Both sides of every pair run in this call.

``python benchmarks/lora_exports.py [--write]`` prints JSON, and keeps it in ``results/lora_exports.json``;
the exit status says whether all bars hold. Needs peft and transformers.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from machine import write

from mindspeed_models.features.lora import Lora
from mindspeed_testing.verify import verify
from mindspeed_testing.worlds import run_world

_BATCH = (
    *("--micro-batch-size", "1", "--global-batch-size", "2", "--seq-length", "16", "--mock-data"),
    *("--num-workers", "0", "--eval-iters", "0", "--lr", "1e-2", "--lr-decay-style", "constant"),
    *("--train-iters", "4", "--attention-dropout", "0", "--hidden-dropout", "0", "--use-cpu-initialization"),
    *("--make-vocab-size-divisible-by", "1"),
)
_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_TARGETS = ("--lora-target-modules", *_MODULES)
_IDS = torch.arange(16).reshape(1, 16) * 3 % 96
LAYOUTS, LOGITS = 1e-4, 1e-5
"""Bars: of layouts, and of logits by the largest of them."""


def layouts() -> dict[str, float | None]:
    """Return the largest relative error of each proof in a layout."""
    found = {}
    for scenario in Lora.verify:
        verdict = verify(Lora, scenario)
        found[scenario.name] = verdict.largest_error if verdict.passed else None
    return found


def write_base(folder: Path) -> None:
    """Write a small model of LLaMA's kind whose weights are large enough to show a wrong mapping."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)


def load(folder: Path) -> Any:
    """Load it with transformers."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def here(base: str, flags: tuple[str, ...], steps: int) -> torch.Tensor:
    """Return the logits of adapters here, after some steps; runs in a world."""
    from mindspeed_core.activation import activate
    from mindspeed_megatron.global_state import destroy_megatron_state
    from mindspeed_megatron.unwrap import unwrap
    from mindspeed_train.interface import setup

    try:
        line = [*_BATCH, "--load", base, *_TARGETS, *flags]
        with activate(line, platform="cpu", host="standalone") as session:
            run = setup(session)
            for _ in range(steps):
                session.call("train_step", run=run)
                run.iteration += 1
                run.consumed_train_samples += 2
            if steps:
                session.call("save_checkpoint", run=run, reason="end")
            with torch.no_grad():
                found: torch.Tensor = unwrap(run.model[0]).eval()(_IDS, _IDS * 0 + torch.arange(16), None)
            return found
    finally:
        destroy_megatron_state()


def logits() -> dict[str, float]:
    """Return differences of logits by the largest of them."""
    import peft

    from mindspeed_models.program import main as models

    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        folder = Path(name)
        base = folder / "base"
        write_base(base)
        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=_MODULES, init_lora_weights=False, task_type="CAUSAL_LM"
        )
        theirs = peft.get_peft_model(load(base), config).eval()
        theirs.save_pretrained(folder / "theirs")
        (read,) = run_world(here, 1, str(base), ("--lora-load", str(folder / "theirs")), 0)
        flags = ("--lora-r", "4", "--lora-alpha", "8", "--save", str(folder / "adapter"))
        (trained,) = run_world(here, 1, str(base), flags, 2)
        adapter = ("--lora-load", str(folder / "adapter"))
        for words in (
            ("export-lora", *adapter, "--model-config", str(base), "--save", str(folder / "ours")),
            ("merge-lora", "--load", str(base), *adapter, "--save", str(folder / "merged")),
        ):
            with redirect_stdout(sys.stderr):
                status = models(words)
            if status:
                raise SystemExit(f"mindspeed-models {' '.join(words)} failed")
        ours = peft.PeftModel.from_pretrained(load(base), folder / "ours").eval()
        pairs = {
            "peft directory here": (read, theirs(_IDS).logits),
            "trained here in peft": (ours(_IDS).logits, trained),
            "merged in transformers": (load(folder / "merged")(_IDS).logits, trained),
        }
        return {
            name: float((one - other).abs().max() / other.abs().max()) for name, (one, other) in pairs.items()
        }


def main() -> int:
    """Print both tables; the exit status says whether the bars hold."""
    found = {"layouts": layouts(), "logits": logits()}
    print(json.dumps(found, indent=1))
    if "--write" in sys.argv[1:]:
        write("lora_exports", found)
    fine = all(error is not None and error <= LAYOUTS for error in found["layouts"].values())
    return 0 if fine and all(error <= LOGITS for error in found["logits"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
