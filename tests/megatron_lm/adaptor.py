"""Megatron-LM's own scripts with the adaptor's line, against `mindspeed-train` on the same data and seed.

Run by `run.sh` with MEGATRON_LM_PATH naming a checkout. Each case trains on both sides and compares the loss
of every step; besides it is checked that a resumed run goes on exactly, that nothing of torch and megatron is
left changed, and what the adaptor costs at the start. The exit status is 0 when everything agrees.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cases import SHARED, WITHOUT_DROPOUT
from corpus import write_corpus

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
STEPS = 20
TOLERANCE = 1e-5
MOST_PATCHES = 11
"""Ten, and the one by which the steps are watched."""
MOST_SECONDS = 0.5
LONGEST_SECONDS = 900
SAVED_AT = 10

KERNELS = (
    "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope "
    "--use-fused-rmsnorm --use-fused-swiglu --use-flash-attn"
)
PROFILE = "--profile --profile-step-start 2 --profile-step-end 4 --profile-level level1 --profile-ranks 0"
EXPERTS = (
    "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
    "--moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --disable-bias-linear"
)

WHOLE = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--group-query-attention --num-query-groups 2"
)
SPLIT = f"--context-parallel-size 2 {WHOLE}"
PACKED = "--reset-attention-mask --eod-mask-loss"


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        name: shown in the table.
        flags: of both sides.
        world_size: processes.
        late: megatron is imported before the adaptor.
        theirs: flags that Megatron-LM alone has.
        whole: flags of a training without features in one process, with the same losses but for rounding.
    """

    name: str
    flags: str
    world_size: int = 2
    late: bool = False
    theirs: str = ""
    whole: str = ""


CASES = (
    Case("single", "", world_size=1),
    Case("single, adaptor last", "", world_size=1, late=True),
    Case("dp2", ""),
    Case("tp2 + sequence parallel", "--tensor-model-parallel-size 2 --sequence-parallel"),
    Case("pp2", "--pipeline-model-parallel-size 2"),
    Case("interleaved pp2", "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    Case("ep2", EXPERTS),
    Case(
        "dp2, distributed optimizer",
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    Case("every plugin, dp2", f"{KERNELS} {PROFILE}"),
    Case("every plugin, tp2 + sp", f"{KERNELS} {PROFILE} --tensor-model-parallel-size 2 --sequence-parallel"),
    Case(
        "further kernels, dp2",
        f"{KERNELS} --use-fused-rotary-pos-emb --use-gradient-accumulation-fusion --affinity-cross-entropy "
        "--use-distributed-optimizer --overlap-grad-reduce",
    ),
    Case("grouped experts, ep2", f"{EXPERTS} --moe-grouped-gemm --gemm-gradient-accumulation-fusion"),
    Case("every plugin, pp2", f"{KERNELS} {PROFILE} --pipeline-model-parallel-size 2"),
    Case("cp2, ring", SPLIT, whole=WHOLE),
    Case("cp2, heads", f"{SPLIT} --context-parallel-algo ulysses_cp_algo"),
    Case(
        "cp2, fetched, documents",
        f"{SPLIT} --context-parallel-algo kvallgather_cp_algo {PACKED}",
        whole=f"{WHOLE} {PACKED}",
    ),
    Case(
        "cp2, tp2 + sp, distributed optimizer",
        f"{SPLIT} --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer",
        world_size=4,
    ),
    Case(
        "cp2, pp2, documents",
        f"{SPLIT} --context-parallel-algo adaptive_cp_algo {PACKED} --reset-position-ids "
        "--pipeline-model-parallel-size 2",
        world_size=4,
    ),
    Case(
        "cp2, interleaved pp2, documents",
        f"{SPLIT} {PACKED} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
        world_size=4,
    ),
    Case(
        "cp2, predictions, dropout",
        f"{SPLIT} --mtp-num-layers 1 --attention-dropout 0.1 --hidden-dropout 0.1",
    ),
    Case("cp2, experts, loss per token", f"{SPLIT} {EXPERTS} --calculate-per-token-loss"),
    Case(
        "packed documents, pp4",
        f"{WHOLE} {PACKED} --pipeline-model-parallel-size 4",
        world_size=4,
        theirs="--no-create-attention-mask-in-dataloader",
    ),
    Case(
        "packed documents, tp2 + sp, pp2",
        f"{WHOLE} {PACKED} --reset-position-ids --pipeline-model-parallel-size 2 "
        "--tensor-model-parallel-size 2 --sequence-parallel",
        world_size=4,
        theirs="--no-create-attention-mask-in-dataloader",
    ),
)
RESUMED = (
    Case("resume, dp2", "--attention-dropout 0.1 --hidden-dropout 0.1"),
    Case(
        "resume, distributed optimizer, every plugin",
        f"{KERNELS} --use-distributed-optimizer --attention-dropout 0.1 --hidden-dropout 0.1",
    ),
    Case("resume, cp2", f"{SPLIT} --attention-dropout 0.1 --hidden-dropout 0.1"),
    Case(
        "resume, tp2, fully reshardable",
        "--tensor-model-parallel-size 2 --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable "
        "--attention-dropout 0.1 --hidden-dropout 0.1",
    ),
)


def main() -> int:
    """Compare, print, answer the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--case", action="append", help="only this case; may be given several times")
    parser.add_argument("--keep", type=Path, help="keep logs in this folder")
    asked = parser.parse_args()
    checkout = named_checkout()
    if checkout is None:
        return 2
    fine = True
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        write_corpus(folder / "corpus")
        print(
            f"{'case':46} {'steps':>5} {'first':>9} {'last':>9} {'off':>9} {'calls':>5} {'start':>6}",
            flush=True,
        )
        for index, case in enumerate(CASES):
            if not asked.case or case.name in asked.case:
                fine &= compare(case, checkout, folder, str(index))
        for index, case in enumerate(RESUMED):
            if not asked.case or case.name in asked.case:
                fine &= resume(case, checkout, folder, f"r{index}")
    print("all agree" if fine else "DIFFERENT")
    return 0 if fine else 1


def named_checkout() -> Path | None:
    """Return the checkout that MEGATRON_LM_PATH names; None, after a sentence, where there is none."""
    checkout = Path(os.environ.get("MEGATRON_LM_PATH", ""))
    if (checkout / "pretrain_gpt.py").is_file():
        return checkout
    print(f"MEGATRON_LM_PATH {str(checkout)!r}: name a checkout of Megatron-LM", file=sys.stderr)
    return None


def compare(case: Case, checkout: Path, folder: Path, name: str) -> bool:
    """One case on both sides."""
    flags = [*SHARED, *_dropout(case), *case.flags.split(), "--train-iters", str(STEPS)]
    theirs, found = adapted(
        case, checkout, folder / name, [*flags, *case.theirs.split(), *data(folder, name)]
    )
    ours = own(case, folder / name, [*flags, *data(folder, name + "o")])
    off = worst(theirs, ours)
    complete = len(theirs) == len(ours) == STEPS
    fine = tell(case, theirs, off, complete and off <= TOLERANCE, found)
    if case.whole:
        alone = Case(f"{case.name}: whole sequences", case.whole, world_size=1)
        flags = [*SHARED, *_dropout(alone), *alone.flags.split(), "--train-iters", str(STEPS)]
        losses, found = adapted(alone, checkout, folder / f"{name}w", [*flags, *data(folder, name + "w")])
        off = worst(losses, theirs)
        fine &= tell(alone, losses, off, len(losses) == STEPS and off <= TOLERANCE, found)
    return fine


def resume(case: Case, checkout: Path, folder: Path, name: str) -> bool:
    """An uninterrupted run, and one in two parts, all inside Megatron-LM."""
    flags = [*SHARED, *case.flags.split(), "--train-iters", str(STEPS)]
    whole, _ = adapted(case, checkout, folder / f"{name}w", [*flags, *data(folder, name)])
    place = ["--save", str(folder / f"{name}c"), "--save-interval", str(SAVED_AT)]
    adapted(
        case,
        checkout,
        folder / f"{name}a",
        [*flags, *data(folder, name), *place, "--exit-interval", str(SAVED_AT)],
    )
    load = ["--load", str(folder / f"{name}c")]
    rest, found = adapted(case, checkout, folder / f"{name}b", [*flags, *data(folder, name), *load])
    off = worst(rest, whole[SAVED_AT:])
    return tell(case, rest, off, len(rest) == STEPS - SAVED_AT and off == 0.0, found)


def _dropout(case: Case) -> Sequence[str]:
    return () if "--attention-dropout" in case.flags else WITHOUT_DROPOUT


def data(folder: Path, name: str) -> list[str]:
    """Flags of the data; each side builds its own index files."""
    return ["--data-path", str(folder / "corpus"), "--data-cache-path", str(folder / f"cache-{name}")]


def tell(case: Case, losses: Sequence[float], off: float, fine: bool, found: dict) -> bool:
    """One line, and what is wrong."""
    fine &= found["calls"] <= MOST_PATCHES and not found["left"] and found["start"] <= MOST_SECONDS
    print(
        f"{case.name:46} {len(losses):5d} {losses[0]:9.6f} {losses[-1]:9.6f} {off:9.1e} {found['calls']:5d} "
        f"{found['start']:5.2f}s{'' if fine else '  DIFFERENT'}",
        flush=True,
    )
    if found["left"]:
        print("  left behind:", ", ".join(found["left"][:10]))
    return fine


def worst(expected: Sequence[float], found: Sequence[float]) -> float:
    """The largest relative difference."""
    return max((abs(a - b) / abs(a) for a, b in zip(expected, found)), default=float("inf"))


def adapted(case: Case, checkout: Path, place: Path, flags: Sequence[str]) -> tuple[list[float], dict]:
    """Losses of Megatron-LM's script with the line, and what was found out on the way."""
    place.mkdir(parents=True)
    numbers, facts = place / "numbers.jsonl", place / "facts"
    numbers.touch()
    python = os.environ.get("MEGATRON_LM_PYTHON", sys.executable)
    script = str(checkout / "pretrain_gpt.py")
    command = [python, str(HERE / "adapted_rank.py"), script, str(numbers), str(facts), *flags]
    log = place / "adapted.log"
    environment = {"ADAPTOR_FIRST": "0" if case.late else "1"}
    launch(command, case.world_size, log, {**environment, "PYTHONPATH": str(checkout)}, place)
    records = [json.loads(line) for line in numbers.read_text(encoding="utf-8").splitlines()]
    by_step = {record["step"]: record["lm loss"] for record in records}
    left: list[str] = []
    start = 0.0
    for rank in range(case.world_size):
        known = json.loads(facts.with_suffix(f".{rank}.json").read_text(encoding="utf-8"))
        left += known["left"] + known["left_after_uninstall"]
        start = max(start, known["adaptor_seconds"])
    calls = next(
        int(line.split()[1])
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.startswith("mindspeed: ") and "functions of Megatron-LM are intercepted" in line
    )
    return [by_step[step] for step in sorted(by_step)], {"left": left, "start": start, "calls": calls}


def own(case: Case, place: Path, flags: Sequence[str]) -> list[float]:
    """Losses of `mindspeed-train`."""
    command = [sys.executable, "-m", "mindspeed_core.train", *flags, "--platform", "cpu"]
    launch([*command, "--run-dir", str(place / "run")], case.world_size, place / "own.log", {}, place)
    lines = (place / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "grad_norm" in record]


def launch(command: Sequence[str], world_size: int, log: Path, extra: dict[str, str], folder: Path) -> None:
    """Run one process per rank, as torchrun does."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    python = Path(command[0])
    path = [str(ROOT), *filter(None, (extra.get("PYTHONPATH"), os.environ.get("PYTHONPATH")))]
    environment = {
        **os.environ,
        **extra,
        "OMP_NUM_THREADS": "1",
        # The checkout compiles its index helpers for the first python3 and python3-config of the path.
        "PATH": os.pathsep.join(
            (str(python.parent), str(python.resolve().parent), os.environ.get("PATH", ""))
        ),
        "PYTHONPATH": os.pathsep.join(path),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
    }
    environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    with log.open("w", encoding="utf-8") as file:
        workers = [
            subprocess.Popen(
                command,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=folder,
            )
            for rank in range(world_size)
        ]
        try:
            statuses = [worker.wait(LONGEST_SECONDS) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
    if any(statuses):
        text = log.read_text(encoding="utf-8", errors="replace")
        raise SystemExit(f"{' '.join(command)}\nended with statuses {statuses}:\n{text[-6000:]}")


if __name__ == "__main__":
    sys.exit(main())
