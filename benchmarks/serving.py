"""Time the server beside the model that it serves, and follow its memory; time the sandbox beside Python.

The first text of a streamed answer is awaited through HTTP and from the model itself, in turns, in one
process. Then 32 clients ask at once, then 1,000 requests follow each other, 8 at a time, while the resident
memory of the process is read. Every goal is printed with what was found, and whether it is met;
``benchmarks/results/serving.json`` receives all.

``python benchmarks/serving.py [--turns N] [--requests N] [--layers N] [--width N]``
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from llama_folder import write_llama
from machine import write

from mindspeed_testing.worlds import run_world

VOCABULARY = 2048
PROMPT = "the cat saw a dog and it ran to its house where nobody had ever been before that day " * 3


def write_model(folder: Path, layers: int, width: int) -> None:
    """Write a LLaMA of that size with random weights, and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    write_llama(folder, layers, width, VOCABULARY)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([PROMPT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def resident() -> float:
    """Return the resident memory of this process in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status has no VmRSS")


class Client:
    """Asks the server from threads of the same process."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, tokens: int, *, stream: bool, seed: int) -> tuple[float, int]:
        """Return the seconds until the first text, or until the answer, and the status."""
        begin = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        body = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 1, "seed": seed, "stream": stream}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        first = b""
        while stream and b'"text": "' not in first:
            first = answer.fp.readline()
        seconds = time.perf_counter() - begin
        answer.read()
        connection.close()
        return time.perf_counter() - begin if not stream else seconds, answer.status


def served(folder: str, turns: int, requests: int) -> dict[str, Any]:
    """Measure with one process."""
    from mindspeed_models import load
    from mindspeed_models.inference.requests import GenerationRequest, GenerationSettings
    from mindspeed_models.serving.asked import Sizes
    from mindspeed_models.serving.prompts import load_prompts
    from mindspeed_models.serving.server import Server
    from mindspeed_models.serving.settings import Limits
    from mindspeed_models.serving.waiting import answer_all

    found: dict[str, Any] = {}
    with load(folder, batch_size=16) as model:
        prompts = load_prompts(model, folder, None)
        ids = prompts.text(PROMPT)

        def directly(seed: int) -> float:
            """Return the seconds until the model's first text."""
            settings = GenerationSettings(do_sample=True, top_k=0, max_new_tokens=8, seed=seed)
            begin = time.perf_counter()
            first: list[float] = []

            def on_text(number: int, text: str) -> bool:
                if not first:
                    first.append(time.perf_counter() - begin)
                return True

            model.generate_requests([GenerationRequest(ids, settings, 1)], on_text)
            return first[0] if first else time.perf_counter() - begin

        sizes = Sizes(model.vocab_size, model.max_positions, ("tiny",))
        server = Server(("127.0.0.1", 0), prompts, sizes, Limits())
        client = Client(int(server.server_address[1]))

        server.start()
        thread = threading.Thread(target=answer_all, args=(model, server.line, lambda: False))
        thread.start()
        try:
            client.ask(8, stream=True, seed=0)
            directly(0)
            # In turns; the server's thread sleeps while the model is asked from here.
            both = [(client.ask(8, stream=True, seed=n)[0], directly(n)) for n in range(turns)]
            found["first through HTTP"], found["first from the model"] = map(list, zip(*both))
            begin = time.perf_counter()
            with ThreadPoolExecutor(32) as pool:
                asked = [pool.submit(client.ask, 16, stream=n % 2 == 0, seed=n) for n in range(32)]
                found["statuses of 32 at once"] = sorted({each.result()[1] for each in asked})
            found["seconds of 32 at once"] = time.perf_counter() - begin
            memory = []
            with ThreadPoolExecutor(8) as pool:
                for done in range(0, requests, 100):
                    list(pool.map(lambda n: client.ask(4, stream=False, seed=n), range(done, done + 100)))
                    memory.append(round(resident(), 1))
            found["resident MiB after each 100 requests"] = memory
        finally:
            server.line.close("measured")
            thread.join()
            server.stop()
    return found


def sandboxed(turns: int) -> dict[str, float]:
    """Time a program in the sandbox, and an interpreter that does nothing."""
    from mindspeed_models.sandbox.run import Sandbox

    sandbox = Sandbox()
    inside = [sandbox.run("assert True").seconds for _ in range(turns)]
    plain = []
    for _ in range(turns):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-I", "-S", "-c", "pass"], check=True)
        plain.append(time.perf_counter() - begin)
    return {"sandbox s": statistics.median(inside), "interpreter s": statistics.median(plain)}


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), args.layers, args.width)
        (found,) = run_world(served, 1, folder, args.turns, args.requests, timeout=3600)
    code = sandboxed(args.turns)
    through = statistics.median(found["first through HTTP"])
    direct = statistics.median(found["first from the model"])
    memory = found["resident MiB after each 100 requests"]
    # The first hundreds fill the allocators.
    growth = memory[-1] - memory[min(2, len(memory) - 1)]
    goals = {
        "time to first text, HTTP over model": (through / direct, 1.2, through / direct <= 1.2),
        "32 requests at once": (
            found["statuses of 32 at once"],
            [200],
            found["statuses of 32 at once"] == [200],
        ),
        "MiB that memory grows from request 300 on": (growth, 16, growth <= 16),
        "seconds of the sandbox beyond an interpreter": (
            code["sandbox s"] - code["interpreter s"],
            0.2,
            code["sandbox s"] - code["interpreter s"] <= 0.2,
        ),
    }
    for name, (value, goal, met) in goals.items():
        print(f"{name}: {value} (goal {goal}): {'met' if met else 'missed'}")
    results = {
        "size": {"layers": args.layers, "width": args.width, "requests": args.requests},
        **found,
        **code,
        "goals": {name: {"value": v, "goal": g, "met": m} for name, (v, g, m) in goals.items()},
    }
    path = write("serving", results)
    print(path)
    return 0 if all(met for _, _, met in goals.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
