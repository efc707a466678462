"""Kept outcomes of long checks of command lines, so that a further run repeats only what has changed.

A record is a JSON file: an entry for each command line, under a digest of the command line itself. A line
whose flags change has another digest, and is checked anew; `summary` drops the old one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
NOT_IN_A_STEP = frozenset(
    # Where a run reads and writes.
    "--data-path --train-data-path --valid-data-path --test-data-path --data-args-path "
    "--per-split-data-args-path --data-cache-path --split --vocab-file --merge-file --tokenizer-model "
    "--tokenizer-name-or-path --tokenizer-not-use-fast --tiktoken-pattern --no-mmap-bin-files "
    "--no-shared-storage --num-workers --workers --handler-name --prompt-type --enable-thinking "
    "--model-type-hf "
    "--save --load --pretrained-checkpoint --save-interval --save-retain-interval --async-save --ckpt-format "
    "--async-strategy --async-ckpt-use-cpu-shm --auto-detect-ckpt-format --ckpt-assume-constant-structure "
    "--ckpt-fully-parallel-load --ckpt-fully-parallel-save --no-ckpt-fully-parallel-save "
    "--ckpt-fully-parallel-load-per-rank-objects --ckpt-drop-redundant-extra-state "
    "--dist-ckpt-optim-fully-reshardable --dist-ckpt-strictness --use-persistent-ckpt-worker "
    "--no-ckpt-load-validate-sharding-integrity --verify-integrity --enable-hf2mg-convert "
    "--exit-on-missing-checkpoint --finetune --no-load-optim --no-load-rng --no-save-optim --no-save-rng "
    "--override-opt-param-scheduler --override-opt_param-scheduler --use-checkpoint-opt_param-scheduler "
    # What it tells.
    "--log-interval --log-energy --log-memory-interval --log-memory-to-tensorboard --log-num-zeros-in-grad "
    "--log-params-norm --log-progress --log-throughput --log-timers-to-tensorboard "
    "--log-validation-ppl-to-tensorboard --logging-level --timing-log-level --timing-log-option "
    "--no-barrier-with-level-1-timing --tensorboard-dir --tensorboard-queue-size --wandb-save-dir "
    "--wandb-exp-name --wandb-project --wandb-entity --op-cal-tflops "
    # How long it goes on, and at which rates.
    "--train-iters --eval-iters --eval-interval --eval-global-batch-size --exit-interval "
    "--exit-duration-in-mins --lr --min-lr --decoupled-lr --decoupled-min-lr --lr-decay-iters "
    "--lr-decay-samples --lr-decay-style --lr-warmup-fraction --lr-warmup-init --lr-warmup-iters "
    "--lr-warmup-samples --lr-wsd-decay-samples --lr-wsd-decay-style --adam-eps --seed "
    "--manual-gc --manual-gc-interval --distributed-timeout-minutes --distributed-backend --use-mcore-models "
    "--rerun-mode".split()
)
"""Options without a part in a step: two command lines that differ in them compute, keep and send the same."""


def digest(*parts: object) -> str:
    """Return 16 hexadecimal digits that stand for a command line and what it is run with."""
    text = json.dumps(parts, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sorted_flags(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the options of a command line with their values, in an order that does not depend on it."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not found:
            found.append([word])
        else:
            found[-1].append(word)
    return sorted(map(tuple, found))


def of_a_step(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the options of a command line that have a part in a step, sorted."""
    return [option for option in sorted_flags(words) if option[0].partition("=")[0] not in NOT_IN_A_STEP]


OK, LACKS, BAD = "ok", "lacks", "bad"
"""Verdicts: as it should be; refused for want of device memory, which it says; not as it should be."""


@dataclass
class Record:
    """Entries of one file in this folder, which several programs may write at a time.

    Attributes:
        name: the file's name.
        entries: what is kept, by digest, with its ``verdict``.
    """

    name: str
    entries: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, name: str) -> Record:
        """Return the record of a file, empty where it does not exist yet."""
        with _alone():
            return cls(name, _entries(name))

    def passed(self, key: str) -> bool:
        """Return whether a command line was checked before, and has a legal outcome."""
        return self.entries.get(key, {}).get("verdict") in (OK, LACKS)

    def add(self, key: str, *, scripts: Sequence[str], **entry: object) -> None:
        """Keep an outcome, and write the file: a long run may be broken off, and another one go on.

        Scripts of other sources that are alike may not be looked at now: they stay until `summary` has seen
        all of them.

        Args:
            key: digest of the command line.
            scripts: names of those that have it.
            entry: the outcome.
        """
        with _alone():
            self.entries = _entries(self.name)
            before = self.entries.get(key, {}).get("scripts", ())
            self.entries[key] = {**entry, "scripts": list(dict.fromkeys((*before, *scripts)))}
            _write(self.name, self.entries)


@contextmanager
def _alone() -> Iterator[None]:
    """Keep other programs from the records inside the context."""
    folder = os.open(FOLDER, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _entries(name: str) -> dict[str, Mapping[str, Any]]:
    path = FOLDER / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _write(name: str, entries: Mapping[str, Mapping[str, Any]]) -> None:
    lines = [
        f" {json.dumps(key)}: {json.dumps(entry)}"
        for key, entry in sorted(entries.items(), key=lambda item: (item[1]["script"], item[0]))
    ]
    (FOLDER / name).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def summary(name: str, scripts: Mapping[str, Sequence[str]], *, whole: bool) -> int:
    """Print how many command lines of a record are good, and bring it up to date.

    Args:
        name: the record's file.
        scripts: names of the scripts of each command line, by its digest.
        whole: these are all command lines that there are; what else is kept is of none.

    Returns:
        The exit status: 1 where one is not as it should be.
    """
    with _alone():
        entries = _entries(name)
        if whole:
            entries = {key: entry for key, entry in entries.items() if key in scripts}
        for key in entries.keys() & scripts.keys():
            before = () if whole else entries[key].get("scripts", ())
            entries[key] = {**entries[key], "scripts": list(dict.fromkeys((*before, *scripts[key])))}
        _write(name, entries)
    found = Counter(entries.get(key, {}).get("verdict") for key in scripts)
    text = f"{name}: {found[OK]} of {len(scripts)} command lines are good, {found[BAD]} are not"
    if found[LACKS]:
        text += f", {found[LACKS]} more lack memory of the device that they are planned for"
    print(text, flush=True)
    return int(bool(found[BAD]))
