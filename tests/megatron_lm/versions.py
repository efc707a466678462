"""Megatron-LM's own `pretrain_gpt.py` with the adaptor's line against the untouched script, step by step.

Run with MEGATRON_LM_PATH naming a checkout of any supported version, and MEGATRON_LM_PYTHON an interpreter
with what it imports. Everything is trained with the checkout's own megatron-core, several trainings in one
process per rank. The exit status is 0 when every loss agrees within what its case allows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from adaptor import launch, named_checkout, worst
from cases import SHARED, THEIRS, WITHOUT_DROPOUT
from corpus import write_corpus

HERE = Path(__file__).resolve().parent
STEPS, SAVED_AT = 6, 3

LLAMA = (
    "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope "
    "--group-query-attention --num-query-groups 2"
)
EXPERTS = (
    f"{LLAMA} --num-experts 4 --moe-token-dispatcher-type alltoall --moe-router-topk 2 "
    "--moe-aux-loss-coeff 1e-2"
)
FEATURES = "--use-flash-attn --use-fused-rmsnorm --swap-attention --swap-min-bytes 0 --recompute-norm"
MOE_FEATURES = f"{FEATURES} --moe-permute-fusion --moe-permutation-async-comm"
TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
RESET, IN_ATTENTION = "--reset-attention-mask", "--no-create-attention-mask-in-dataloader"
PACKED = f"{RESET} --reset-position-ids --eod-mask-loss"


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        name: shown in the table.
        flags: of both trainings.
        more: flags of features, of the training with the adaptor's line.
        world_size: processes.
        tolerance: largest relative difference of a loss.
        resumed: the training with the line is saved, and resumed from there as another case.
        without: flags of ``flags`` that the untouched script trains without.
    """

    name: str
    flags: str = ""
    more: str = ""
    world_size: int = 2
    tolerance: float = 0.0
    resumed: bool = False
    without: str = ""


CASES = (
    Case("single", world_size=1),
    Case("single, features", LLAMA, FEATURES, world_size=1, tolerance=1e-6),
    Case("single, experts and features", EXPERTS, MOE_FEATURES, world_size=1, tolerance=1e-6),
    Case("tp2", TP),
    Case("pp2", PP),
    Case("dp2, distributed optimizer", SHARDED, resumed=True),
    Case(
        "tp2 + sp, features",
        f"{LLAMA} {TP} --sequence-parallel",
        FEATURES,
        tolerance=1e-6,
        # Megatron-LM alone refuses it without TransformerEngine.
        without="--sequence-parallel",
    ),
    Case("pp2, documents, features", f"{LLAMA} {PP} {PACKED}", FEATURES, tolerance=1e-6),
    Case("dp2, experts and features", f"{EXPERTS} {SHARDED}", MOE_FEATURES, tolerance=1e-6, resumed=True),
    Case(
        "ep2, experts and features", f"{EXPERTS} --expert-model-parallel-size 2", MOE_FEATURES, tolerance=1e-6
    ),
    Case(
        "cp2, ring", f"{LLAMA} --context-parallel-size 2", tolerance=1e-5, without="--context-parallel-size 2"
    ),
    Case(
        "cp2, fetched, documents",
        f"{LLAMA} {PACKED} --context-parallel-size 2",
        "--context-parallel-algo kvallgather_cp_algo",
        tolerance=1e-5,
        without="--context-parallel-size 2",
    ),
)


def trainings(case: Case, data: Sequence[str], folder: Path) -> list[dict]:
    """The trainings of a case: untouched, with the line, and resumed."""
    length = ["--train-iters", str(STEPS)]
    shared = [*SHARED, *WITHOUT_DROPOUT, *length, *data]
    # Documents are apart for Megatron-LM's own attention where the mask comes with the data.
    theirs = [flag for flag in THEIRS if flag != IN_ATTENTION or RESET not in case.flags]
    plain = case.flags.replace(case.without, "") if case.without else case.flags
    place = str(folder / case.name.replace(" ", "-").replace(",", ""))
    saved = ["--save", place, "--save-interval", str(SAVED_AT)] if case.resumed else []
    flags = [*shared, *case.flags.split(), *case.more.split(), "--platform", "cpu", *THEIRS[2:]]
    found = [
        {"name": f"{case.name}: untouched", "adapted": False, "flags": [*shared, *theirs, *plain.split()]},
        {"name": case.name, "adapted": True, "flags": [*flags, *saved]},
    ]
    if case.resumed:
        load = ["--load", place, "--ckpt-step", str(SAVED_AT)]
        found.append({"name": f"{case.name}: resumed", "adapted": True, "flags": [*flags, *load]})
    return found


def main() -> int:
    """Compare, print, answer the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--case", action="append", help="only this case; may be given several times")
    parser.add_argument("--keep", type=Path, help="keep logs in this folder, which must be empty")
    asked = parser.parse_args()
    checkout = named_checkout()
    if checkout is None:
        return 2
    chosen = [case for case in CASES if not asked.case or case.name in asked.case]
    fine = True
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        write_corpus(folder / "corpus")
        print(
            f"{'case':34} {'steps':>5} {'first':>9} {'last':>9} {'off':>8} {'norm':>8} {'calls':>5}",
            flush=True,
        )
        for size in sorted({case.world_size for case in chosen}):
            of_size = [case for case in chosen if case.world_size == size]
            found = train(of_size, size, checkout, folder / str(size), folder / "corpus")
            for case in of_size:
                fine &= tell(case, found)
    print("all agree" if fine else "DIFFERENT")
    return 0 if fine else 1


def train(cases: Sequence[Case], size: int, checkout: Path, folder: Path, corpus: Path) -> dict[str, dict]:
    """Run the trainings of all cases of a size in one process per rank; what each gave, by name."""
    folder.mkdir()
    data = ["--data-path", str(corpus), "--data-cache-path", str(folder / "cache")]
    listed, results = folder / "cases.json", folder / "results.jsonl"
    planned = [training for case in cases for training in trainings(case, data, folder)]
    listed.write_text(json.dumps(planned), encoding="utf-8")
    python = os.environ.get("MEGATRON_LM_PYTHON", sys.executable)
    command = [python, str(HERE / "versions_rank.py"), str(listed), str(results)]
    launch(command, size, folder / "ranks.log", {"PYTHONPATH": str(checkout)}, folder)
    found: dict[str, dict] = {}
    for line in map(json.loads, results.read_text(encoding="utf-8").splitlines()):
        known = found.setdefault(line["name"], {})
        found[line["name"]] = {**known, **{name: value for name, value in line.items() if value or not known}}
    return found


def tell(case: Case, found: dict[str, dict]) -> bool:
    """Print a line for a training with the adaptor's line, and one for the rest of it after a load."""
    plain, ours = found[f"{case.name}: untouched"], found[case.name]
    fine = _line(case.name, plain, ours, 0, case.tolerance)
    if case.resumed:
        fine &= _line(f"{case.name}: resumed", ours, found[f"{case.name}: resumed"], SAVED_AT, 0.0)
    return fine


def _line(name: str, expected: dict, ours: dict, skipped: int, tolerance: float) -> bool:
    error = expected["error"] or ours["error"]
    if error:
        print(f"{name:34} {error[:200]}", flush=True)
        return False
    losses, reached = expected["lm loss"][skipped:], ours["lm loss"]
    off, norm = worst(losses, reached), worst(expected["grad_norm"][skipped:], ours["grad_norm"])
    fine = len(losses) == len(reached) == STEPS - skipped and off <= tolerance
    first, last = (reached[0], reached[-1]) if reached else (0.0, 0.0)
    print(
        f"{name:34} {len(reached):5d} {first:9.6f} {last:9.6f} {off:8.1e} {norm:8.1e} {ours['calls']:5d}"
        f"{'' if fine else '  DIFFERENT'}",
        flush=True,
    )
    return fine


if __name__ == "__main__":
    sys.exit(main())
