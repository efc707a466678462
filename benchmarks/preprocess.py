"""Prepare the same corpus with ``mindspeed-models preprocess`` and with ``datasets.map``.

Bytes are compared for 1, 2 and 4 workers and after three kills, and tokens a second with what
``datasets.map`` tokenizes with as many processes, its writing of a ``.bin`` file included. Both sides take
turns, so that whatever the machine does meets both.

``python benchmarks/preprocess.py [--records N] [--turns N]`` prints JSON; ``--write`` keeps it in
``results/preprocess.json``. The exit status is 1 where bytes differ or ``datasets.map`` is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from machine import write

KILLS = (3, 9, 17)
PART_BYTES = 1 << 18
_WORDS = "the cat saw a dog and it ran to its house where nobody had ever been before that day".split()


def write_corpus(folder: Path, records: int) -> tuple[Path, Path]:
    """Write JSON lines of made-up text, and a tokenizer trained on them."""
    from mindspeed_train.text.tokenizer import train_tokenizer

    generator = np.random.RandomState(5)
    source = folder / "corpus.jsonl"
    texts = []
    with source.open("w") as stream:
        for _ in range(records):
            words = generator.choice(_WORDS, size=generator.randint(50, 400))
            texts.append(" ".join(words))
            stream.write(json.dumps({"text": texts[-1]}) + "\n")
    tokenizer = folder / "tokenizer.json"
    train_tokenizer(texts[:200], 2048).save(tokenizer)
    return source, tokenizer


def ours(source: Path, tokenizer: Path, prefix: Path, workers: int) -> int:
    """Prepare the corpus; return its tokens."""
    from mindspeed_models.data.preprocess import preprocess
    from mindspeed_models.data.settings import Settings
    from mindspeed_models.data.tokenizers import TokenizerChoice

    settings = Settings(TokenizerChoice(path=str(tokenizer)), append_eod=True)
    made = preprocess(
        [str(source)], str(prefix), settings, workers=workers, part_bytes=PART_BYTES, overwrite=True
    )
    return made.counts.tokens


def theirs(source: Path, tokenizer: Path, prefix: Path, workers: int) -> int:
    """Tokenize with ``datasets.map`` and write the tokens as megatron-core's builder does."""
    import datasets
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(tokenizer))
    library.encode_special_tokens = True
    end = library.token_to_id("<|endoftext|>")

    def tokenized(batch: Any) -> Any:
        found = library.encode_batch(batch["text"], add_special_tokens=False)
        return {"ids": [[*encoding.ids, end] for encoding in found]}

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as cache:
        read = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=cache)
        mapped = read.map(tokenized, batched=True, num_proc=workers, remove_columns=read.column_names)
        tokens = 0
        with Path(f"{prefix}.bin").open("wb") as stream:
            for row in mapped:
                ids = np.asarray(row["ids"], dtype=np.uint16)
                tokens += len(ids)
                stream.write(ids.tobytes())
    return tokens


def digest(prefix: Path) -> str:
    """Return the SHA-256 of both files of a dataset."""
    files = (Path(f"{prefix}_text_document.{suffix}") for suffix in ("bin", "idx"))
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


_KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import preprocess as benchmark
from pathlib import Path
from mindspeed_models.data import samples
plain, left = samples.np.save, int(sys.argv[5])
def save(*given):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    plain(*given)
samples.np.save = save
benchmark.ours(*map(Path, sys.argv[2:5]), 1)
"""


def killed(source: Path, tokenizer: Path, prefix: Path) -> int:
    """Kill the preparation three times, then finish it; return how often it was killed."""
    found = 0
    for after in KILLS:
        words = [str(Path(__file__).parent), str(source), str(tokenizer), str(prefix), str(after)]
        ended = subprocess.run([sys.executable, "-c", _KILLED, *words], env=os.environ, capture_output=True)
        found += ended.returncode == -signal.SIGKILL
    ours(source, tokenizer, prefix, 2)
    return found


def compare(records: int, turns: int) -> dict[str, Any]:
    """Return digests, and tokens a second of both sides."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, tokenizer = write_corpus(folder, records)
        digests = {}
        for workers in (1, 2, 4):
            ours(source, tokenizer, folder / f"w{workers}", workers)
            digests[f"{workers} workers"] = digest(folder / f"w{workers}")
        kills = killed(source, tokenizer, folder / "killed")
        digests[f"{kills} kills"] = digest(folder / "killed")
        speeds: dict[str, list[float]] = {"ours": [], "datasets.map": []}
        counts = set()
        for _ in range(turns):
            for side, function in (("ours", ours), ("datasets.map", theirs)):
                began = time.perf_counter()
                tokens = function(source, tokenizer, folder / "timed", 2)
                speeds[side].append(tokens / (time.perf_counter() - began))
                counts.add(tokens)
        best = {side: max(found) for side, found in speeds.items()}
        return {
            "records": records,
            "tokens": sorted(counts),
            "equal": len(set(digests.values())) == 1,
            "digests": digests,
            "tokens_per_second": best,
            "ratio": best["ours"] / best["datasets.map"],
        }


def main() -> int:
    """Print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=10000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="Keep the results.")
    asked = parser.parse_args()
    found = compare(asked.records, asked.turns)
    print(json.dumps(found, indent=1))
    if asked.write:
        write("preprocess", found)
    return 0 if found["equal"] and found["ratio"] >= 1.0 else 1


if __name__ == "__main__":
    sys.exit(main())
