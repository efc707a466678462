"""A converted checkpoint in Megatron-LM's own training, against `mindspeed-train` on the same weights.

A small LLaMA in Hugging Face's files is converted once. `pretrain_gpt.py --load CONVERTED --finetune` goes
on from it, unchanged and with the adaptor's line, and `mindspeed-train --pretrained-checkpoint CONVERTED`
does; the losses of every step are compared. Adapters are finetuned on instruction data besides, in both.
Needs mindspeed-models, and a checkout as parity.py does; the exit status is 0 when all agree.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import adaptor
import parity
from cases import Case
from corpus import VOCABULARY, write_corpus

from mindspeed_models.features.instruction_proofs import write_samples
from mindspeed_testing.small_llama import write_small_llama

STEPS = 10
TOLERANCE = 1e-6
MODEL = (
    "--num-layers 4 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 8 --group-query-attention "
    "--num-query-groups 4 --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --max-position-embeddings 128"
).split()
TRAINING = (
    "--seq-length 128 --micro-batch-size 2 --global-batch-size 8 --lr 2e-3 --min-lr 2e-4 "
    "--lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --seed 1234 --split 90,8,2 "
    "--eval-interval 25 --eval-iters 0 --log-interval 1 --transformer-impl local "
    "--tokenizer-type NullTokenizer --attention-dropout 0 --hidden-dropout 0 --num-workers 1 "
    f"--vocab-size {VOCABULARY} --make-vocab-size-divisible-by 128 --train-iters {STEPS}"
).split()
TP2, PP2 = ("--tensor-model-parallel-size", "2"), ("--pipeline-model-parallel-size", "2")
LAYOUTS = (Case("single", 1), Case("tp2", 2, TP2), Case("pp2", 2, PP2))
ADAPTERS = (Case("adapters", 1), Case("adapters, tp2", 2, TP2))
FINETUNING = (
    "--is-instruction-dataset --variable-seq-lengths --lora-r 4 --lora-alpha 8 "
    "--lora-target-modules linear_qkv linear_proj linear_fc1 linear_fc2"
).split()


def main() -> int:
    """Convert, train on all sides, print a table, answer the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--case", action="append", help="only this case; may be given several times")
    asked = parser.parse_args().case
    layouts, adapters = (
        [case for case in cases if not asked or case.name in asked] for cases in (LAYOUTS, ADAPTERS)
    )
    checkout = adaptor.named_checkout()
    if checkout is None:
        return 2
    python = os.environ.get("MEGATRON_LM_PYTHON", sys.executable)
    agreed = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder / "corpus")
        write_samples(folder)
        converted = convert(folder)
        print(f"{'case':14} {'side':10} {'steps':>5} {'first loss':>10} {'last loss':>10} {'off':>9}")
        for case in layouts:
            here = folder / case.name
            here.mkdir()
            flags = [*MODEL, *TRAINING, *case.flags, "--data-path", str(folder / "corpus")]
            ours = parity.run_ours(case, [*flags, "--pretrained-checkpoint", converted], here)["lm loss"]
            loads = [*flags, "--load", converted, "--finetune"]
            agreed &= tell(
                case, "unchanged", parity.run_megatron_lm(case, loads, here, python)["lm loss"], ours
            )
            if case.world_size == 1:
                agreed &= tell(case, "adaptor", with_adaptor(case, checkout, here, loads), ours)
        for case in adapters:
            here = folder / case.name
            here.mkdir()
            flags = [*MODEL, *TRAINING, *case.flags, *FINETUNING, "--data-path", str(folder / "samples")]
            flags += ["--load", converted]
            ours = parity.run_ours(case, flags, here)["lm loss"]
            agreed &= tell(case, "adaptor", with_adaptor(case, checkout, here, flags), ours)
    return 0 if agreed else 1


def with_adaptor(case: Case, checkout: Path, folder: Path, flags: Sequence[str]) -> Sequence[float]:
    """Losses of Megatron-LM's script with the adaptor's line."""
    cache = ("--data-cache-path", str(folder / "adapted-cache"))
    one = adaptor.Case(case.name, "", case.world_size)
    losses, _ = adaptor.adapted(one, checkout, folder / "adapted", [*flags, *cache])
    return losses


def tell(case: Case, side: str, losses: Sequence[float], ours: Sequence[float]) -> bool:
    """One line; whether every loss agrees."""
    off = parity.worst(losses, ours)
    fine = len(losses) == len(ours) == STEPS and off <= TOLERANCE
    shown = f"{len(losses):5d} {losses[0]:10.6f} {losses[-1]:10.6f} {off:9.1e}"
    print(f"{case.name:14} {side:10} {shown}{'' if fine else '  DIFFERENT'}", flush=True)
    return fine


def convert(folder: Path) -> str:
    """Write a model with the vocabulary of the corpus, and convert it; return the checkpoint's folder."""
    source = write_small_llama(folder / "hf", vocab_size=VOCABULARY + 1)
    words = ("convert", "--input-model-dir", str(source), "--output-model-dir", str(folder / "converted"))
    subprocess.run([sys.executable, "-m", "mindspeed_models.program", *words], check=True)
    return str(folder / "converted")


if __name__ == "__main__":
    sys.exit(main())
