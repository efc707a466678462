"""Time generation beside transformers, and count the bytes of its cache, scores and messages.

Both sides have the same weights and one thread, and take turns. Counted bytes are the same on every machine.
Every goal is printed with what was found, and whether it is met; ``benchmarks/results/generation.json``
receives all.

``python benchmarks/generation.py [--turns N] [--layers N] [--width N]``
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llama_folder import write_llama
from machine import write

from mindspeed_testing.worlds import run_world

PROMPT, NEW, LATE = 32, 96, 512
BATCH, CHUNK, LONG = 8, 64, 448
VOCABULARY = 4096


def prompt_of(length: int, number: int = 0) -> list[int]:
    """Return made-up ids."""
    return [(7 * place + 11 * number) % (VOCABULARY - 8) + 4 for place in range(length)]


def best(function: Callable[[], Any], turns: int) -> float:
    """Return the shortest of some durations, in seconds."""
    found = []
    for _ in range(turns):
        begin = time.perf_counter()
        function()
        found.append(time.perf_counter() - begin)
    return min(found)


def timed(folder: str, turns: int) -> dict[str, float]:
    """Time both sides in one process."""
    import torch
    import transformers

    from mindspeed_models import load

    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    short, late = prompt_of(PROMPT), prompt_of(LATE)
    with load(folder, batch_size=BATCH) as model, torch.no_grad():

        def ours(prompt: Any, new: int) -> Any:
            return model.generate(prompt, detokenize=False, max_new_tokens=new, eos_token_id=[])

        def of_transformers(new: int) -> list[int]:
            ids = torch.tensor([short])
            rows = theirs.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0
            )
            return rows[0, PROMPT:].tolist()

        def recomputed(new: int) -> list[int]:
            tokens = list(short)
            for _ in range(new):
                ids = torch.tensor([tokens])
                positions = torch.arange(len(tokens))[None]
                logits = model.run.model[0](ids, positions, None, runtime_gather_output=True)
                tokens.append(int(logits[0, -1, :VOCABULARY].argmax()))
            return tokens[PROMPT:]

        same = ours(short, NEW) == of_transformers(NEW) == recomputed(NEW)
        several = [prompt_of(PROMPT, number) for number in range(BATCH)]

        def one_by_one() -> None:
            for prompt in several:
                ours(prompt, NEW)

        # The difference of two lengths leaves the prompt out.
        return {
            "same tokens": float(same),
            "ours": best(lambda: ours(short, NEW), turns),
            "transformers": best(lambda: of_transformers(NEW), turns),
            "recomputed": best(lambda: recomputed(NEW), turns),
            "token at 32": (best(lambda: ours(short, 33), turns) - best(lambda: ours(short, 1), turns)) / 32,
            "token at 512": (best(lambda: ours(late, 33), turns) - best(lambda: ours(late, 1), turns)) / 32,
            "batch": best(lambda: ours(several, NEW), turns),
            "alone": best(one_by_one, turns),
        }


def scores_of_prefill(folder: str) -> dict[str, int]:
    """Count the elements of the largest scores of attention, of a whole prompt and in chunks."""
    import torch

    from mindspeed_models import load

    found = {}
    for name, chunk in (("whole", 0), ("chunks", CHUNK)):
        largest = 0

        def remember(module: Any, given: Any) -> None:
            nonlocal largest
            largest = max(largest, given[0].numel())

        with load(folder, prefill_chunk=chunk) as model, torch.no_grad():
            for module in model.run.model[0].modules():
                if type(module).__name__ == "FusedScaleMaskSoftmax":
                    module.register_forward_pre_hook(remember)
            model.generate(prompt_of(LONG), detokenize=False, max_new_tokens=1, eos_token_id=[])
        found[name] = largest
    return found


def sent(folder: str, layout: dict[str, int]) -> dict[str, float]:
    """Count the bytes that rank 0 hands to communication for each token of decoding."""
    import torch
    import torch.distributed as dist

    from mindspeed_models import load

    with load(folder, **layout) as model:
        counted = {"sum": 0, "send": 0, "gather": 0, "broadcast": 0}
        names = {
            "all_reduce": "sum",
            "send": "send",
            "all_gather_into_tensor": "gather",
            "_all_gather_base": "gather",
            "broadcast": "broadcast",
        }
        plain = {name: getattr(dist, name) for name in names}

        def counting(name: str) -> Callable[..., Any]:
            def call(*given: Any, **named: Any) -> Any:
                place = 1 if names[name] == "gather" else 0
                tensor = given[place] if len(given) > place else None
                if isinstance(tensor, torch.Tensor):
                    counted[names[name]] += tensor.numel() * tensor.element_size()
                return plain[name](*given, **named)

            return call

        def count(new: int) -> dict[str, int]:
            counted.update(dict.fromkeys(counted, 0))
            model.generate(prompt_of(PROMPT), detokenize=False, max_new_tokens=new, eos_token_id=[])
            return dict(counted)

        try:
            for name in names:
                setattr(dist, name, counting(name))
            few, many = count(9), count(25)
        finally:
            for name, function in plain.items():
                setattr(dist, name, function)
        return {name: (many[name] - few[name]) / 16 for name in counted}


def main() -> int:
    """Run all parts, print each goal, and return 1 where one is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folder = str(Path(root) / "model")
        write_llama(Path(folder), given.layers, given.width, VOCABULARY)
        (times,) = run_world(timed, 1, folder, given.turns, timeout=1800)
        (scores,) = run_world(scores_of_prefill, 1, folder)
        tensor = run_world(sent, 2, folder, {"tp": 2})[0]
        pipeline = run_world(sent, 2, folder, {"pp": 2})[0]
    expected_tensor = (2 * given.layers + 1) * given.width * 4
    expected_scores = 8 * CHUNK * LONG
    goals = {
        "transformers / ours, at least 0.7": (times["transformers"] / times["ours"], 0.7),
        "recomputed / ours, at least 3": (times["recomputed"] / times["ours"], 3.0),
        "1.3 x token at 32 / token at 512, at least 1": (
            1.3 * times["token at 32"] / times["token at 512"],
            1.0,
        ),
        "alone / batch of 8, at least 3": (times["alone"] / times["batch"], 3.0),
        "scores by formula / scores in chunks, at least 1": (expected_scores / scores["chunks"], 1.0),
        "sums of tp 2 by formula / sums, at least 1": (expected_tensor / max(1.0, tensor["sum"]), 1.0),
        "message of pp 2 by formula / message, at least 1": (
            given.width * 4 / max(1.0, pipeline["send"]),
            1.0,
        ),
        "same tokens": (times["same tokens"], 1.0),
    }
    results = {
        "sizes": {"layers": given.layers, "width": given.width, "prompt": PROMPT, "new": NEW},
        "seconds": times,
        "largest scores": scores,
        "bytes a token": {"tp 2": tensor, "pp 2": pipeline},
        "goals": {name: {"found": value, "met": value >= bound} for name, (value, bound) in goals.items()},
    }
    print(json.dumps(results, indent=2))
    print(write("generation", results))
    return 0 if all(value >= bound for value, bound in goals.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
