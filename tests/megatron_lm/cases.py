"""What is compared: flags that both programs understand, and those that only Megatron-LM needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from corpus import VOCABULARY

SHARED = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine "
    "--lr-warmup-iters 3 --weight-decay 0.1 --clip-grad 1.0 --seed 1234 --split 90,8,2 --eval-interval 25 "
    "--eval-iters 2 --log-interval 1 --transformer-impl local --tokenizer-type NullTokenizer "
    f"--vocab-size {VOCABULARY} --make-vocab-size-divisible-by 128 --num-workers 1"
).split()
"""Everything but the length of the run and the data."""

WITHOUT_DROPOUT = "--attention-dropout 0 --hidden-dropout 0".split()

THEIRS = (
    "--distributed-backend gloo --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-persist-layer-norm --no-rope-fusion "
    "--no-create-attention-mask-in-dataloader"
).split()
"""CUDA kernels that Megatron-LM uses unless told otherwise, and its backend."""

OURS = "--platform cpu".split()


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        name: shown in the table.
        world_size: processes.
        flags: beside those that all cases share.
    """

    name: str
    world_size: int
    flags: Sequence[str] = ()


_LLAMA = (
    "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
    "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights"
)
CASES = tuple(
    Case(name, size, tuple(flags.split()))
    for name, size, flags in (
        ("single", 1, ""),
        ("dp2", 2, ""),
        ("tp2", 2, "--tensor-model-parallel-size 2"),
        ("pp2", 2, "--pipeline-model-parallel-size 2"),
        ("dp2, distributed optimizer", 2, "--use-distributed-optimizer --overlap-grad-reduce"),
        ("rope, SwiGLU, shared key heads", 1, _LLAMA),
        ("the same, tp2", 2, f"{_LLAMA} --tensor-model-parallel-size 2"),
        ("dropout", 1, "--attention-dropout 0.1 --hidden-dropout 0.1"),
        ("dropout, dp2", 2, "--attention-dropout 0.1 --hidden-dropout 0.1"),
        (
            "dropout, tp2",
            2,
            "--attention-dropout 0.1 --hidden-dropout 0.1 --tensor-model-parallel-size 2",
        ),
        (
            "dropout, pp2",
            2,
            "--attention-dropout 0.1 --hidden-dropout 0.1 --pipeline-model-parallel-size 2",
        ),
    )
)
"""Cases that name a dropout keep it; the others train without."""


def flags_of(case: Case, steps: int) -> list[str]:
    """The flags that both programs get, without the data."""
    dropout = () if "--attention-dropout" in case.flags else WITHOUT_DROPOUT
    return [*SHARED, "--train-iters", str(steps), *dropout, *case.flags]
