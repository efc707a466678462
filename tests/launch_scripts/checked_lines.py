"""The launch scripts of other people, each checked at the world it was written for, without starting it.

``python tests/launch_scripts/checked_lines.py`` prints how many are accepted, beside what was accepted before
flags had verdicts. Paths stand for files that nobody has, so that each script gets made-up data and a
tokenizer without a file; everything else is checked as it stands.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from mindspeed_core.activation import plan_for
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError, Problem
from mindspeed_core.validation import check

LINES = Path(__file__).with_name("lines")
SOURCES = {
    "mindspeed": "MindSpeed's tests and performance models",
    "megatron_lm_0.16.1": "Megatron-LM 0.16.1's training tests",
    "megatron_lm_newest": "the newest Megatron-LM's training tests",
    "mindspeed_llm": "MindSpeed-LLM's examples",
}
BEFORE = {"mindspeed": 1, "megatron_lm_0.16.1": 0, "megatron_lm_newest": 0, "mindspeed_llm": 0}
"""Lines that `mindspeed-train` accepted before flags had verdicts."""
NODE = 8
_FILES = (
    "--data-path --train-data-path --valid-data-path --test-data-path --data-args-path "
    "--per-split-data-args-path --data-cache-path --split --vocab-file --merge-file --tokenizer-model "
    "--tokenizer-type --tokenizer-name-or-path --save --load --pretrained-checkpoint --mock-data "
    "--save-interval --tensorboard-dir --wandb-save-dir --wandb-exp-name --wandb-project --wandb-entity "
    "--save-retain-interval --tiktoken-pattern"
).split()
_READ_FIRST = ("--tokenizer-type", "--tokenizer-name-or-path")


@dataclass(frozen=True)
class Script:
    """One command line: where it is from, its name and its words."""

    source: str
    name: str
    words: tuple[str, ...]

    def value(self, option: str, default: str = "") -> str:
        """Return the word behind the last of an option."""
        places = [place for place, word in enumerate(self.words) if word == option]
        return self.words[places[-1] + 1] if places else default

    def number(self, option: str, default: int = 1) -> int:
        """Return the number behind an option."""
        return int(self.value(option, str(default)))

    def world_sizes(self) -> Iterator[int]:
        """Yield the ranks that the script may be for: whole machines first, the fewest first.

        A script does not say it; its batch has to come out even.
        """
        tensor = self.number("--tensor-model-parallel-size")
        pipeline = self.number("--pipeline-model-parallel-size")
        experts = self.number("--expert-tensor-parallel-size", tensor) * self.number(
            "--expert-model-parallel-size"
        )
        least = math.lcm(tensor * pipeline * self.number("--context-parallel-size"), experts * pipeline)
        machines = math.lcm(least, NODE)
        yield from (machines, least, *(machines * times for times in range(2, 9)))


def scripts(source: str) -> tuple[Script, ...]:
    """Return the scripts of a source."""
    table = json.loads((LINES / f"{source}.json").read_text(encoding="utf-8"))
    # Megatron-LM's tests write lists of names in brackets, which their program takes away.
    lines = {name: re.sub(r"\[([a-z_ ]+)\]", r"\1", line) for name, line in table.items()}
    return tuple(Script(source, name, tuple(shlex.split(line))) for name, line in lines.items())


def without_files(words: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command line without its files, and with made-up data instead."""
    vocabulary = "--vocab-size" in words
    kept, before = True, ""
    for word in with_options_file(words):
        if word.startswith("--"):
            kept = word.partition("=")[0] not in _FILES
        if kept:
            # The made-up tokenizer has an id more than it is given.
            yield str(int(word) - 1) if before == "--vocab-size" else word
        before = word
    # Instruction data is read from files, which nobody opens for a check.
    conversations = {"--is-instruction-dataset", "sft"} & set(words)
    yield from ("--data-path", "conversations") if conversations else ("--mock-data",)
    yield from ("--tokenizer-type", "NullTokenizer")
    if not vocabulary:
        # With the id more it divides among ranks, as torch's FSDP2 wants it.
        yield from ("--vocab-size", "31999" if "--use-torch-fsdp2" in words else "32000")


def with_options_file(words: Sequence[str]) -> list[str]:
    """Return the words with a made-up file of options in the place of one that nobody has."""
    found = list(words)
    for place, word in enumerate(words):
        if word == "--fsdp2-config-path":
            found[place + 1] = str(LINES.with_name("fsdp2_options.yaml"))
    return found


@lru_cache(maxsize=1)
def installed() -> Registry:
    """Return what is installed, looked up once."""
    return Registry.discover()


def problems_of(script: Script, host: str = "standalone", platform: str = "fake") -> tuple[Problem, ...]:
    """Return what is wrong with a script: with its flags as they stand, and at its world without files."""
    from mindspeed_core.flags.flag_set import flag_set

    said = flag_set(installed(), host).parse(with_options_file(script.words)).problems
    if said:
        return said
    if "--use-megatron-fsdp" in script.words or "--use-custom-fsdp" in script.words:
        # It looks at values, which a dry run does not have.
        platform = "cpu"
    first: tuple[Problem, ...] = ()
    for size in script.world_sizes():
        checked = check(
            list(without_files(script.words)),
            world_size=size,
            platform=platform,
            host=host,
            registry=installed(),
        )
        if [problem.flag for problem in checked.problems] != ["--global-batch-size"]:
            return checked.problems
        first = first or checked.problems
    return first


def problems_in_scripts(script: Script) -> tuple[Problem, ...]:
    """Return what is wrong with a script's flags inside of Megatron-LM's own scripts.

    The resolver says it; the rest is Megatron-LM's own to check.
    """
    try:
        plan_for(with_options_file(script.words), host="megatron-lm", platform="cpu", registry=installed())
    except PlanError as error:
        return error.problems
    return ()


def world_of(script: Script, platform: str = "fake") -> int:
    """Return the first of the worlds of an accepted script for which its batch comes out even."""
    for size in script.world_sizes():
        flags = list(without_files(script.words))
        if check(flags, world_size=size, platform=platform, registry=installed()).ok:
            return size
    raise ValueError(f"{script.name}: no world fits its batch")


def all_problems() -> dict[str, dict[str, tuple[Problem, ...]]]:
    """Return what is wrong with every script, by source and name."""
    return {source: {script.name: problems_of(script) for script in scripts(source)} for source in SOURCES}


def all_problems_in_scripts() -> dict[str, dict[str, tuple[Problem, ...]]]:
    """Return what is wrong with every script in Megatron-LM's own scripts, by source and name."""
    return {
        source: {script.name: problems_in_scripts(script) for script in scripts(source)} for source in SOURCES
    }


def kept() -> dict[str, Any]:
    """Return the record behind the documentation, see `record`."""
    found: dict[str, Any] = json.loads(LINES.with_name("accepted.json").read_text(encoding="utf-8"))
    return found


Found = Mapping[str, Mapping[str, Sequence[Problem]]]
"""Problems by source and name of the script."""


def record(found: Found, in_scripts: Found) -> dict[str, object]:
    """Return what the documentation shows: the accepted scripts, and why the others are refused."""
    return {
        source: {
            "title": SOURCES[source],
            "before": BEFORE[source],
            "accepted": sorted(name for name, problems in by_name.items() if not problems),
            "refused": _first_reasons(by_name),
            "refused_in_scripts": _first_reasons(in_scripts[source]),
        }
        for source, by_name in found.items()
    }


def _first_reasons(by_name: Mapping[str, Sequence[Problem]]) -> dict[str, str]:
    return {
        name: f"`{problems[0].flag}`: {problems[0].reason}"
        for name, problems in sorted(by_name.items())
        if problems
    }


def main(arguments: Sequence[str]) -> None:
    """Print the table of accepted scripts; with ``--write`` keep it, with sources tell their problems."""
    found, in_scripts = all_problems(), all_problems_in_scripts()
    if "--write" in arguments:
        text = json.dumps(record(found, in_scripts), indent=1) + "\n"
        LINES.with_name("accepted.json").write_text(text, encoding="utf-8")
    print(f"{'':44} scripts  before  now  inside of Megatron-LM's scripts")
    for source, by_name in found.items():
        accepted, there = (
            sum(not problems for problems in each.values()) for each in (by_name, in_scripts[source])
        )
        print(f"{SOURCES[source]:44} {len(by_name):7}  {BEFORE[source]:6}  {accepted:3}  {there:3}")
    for source in arguments:
        for name, problems in found.get(source, {}).items():
            for problem in problems:
                print(f"{name}: {problem}")


if __name__ == "__main__":
    main(sys.argv[1:])
