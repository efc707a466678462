"""A seeded generator of command lines over every flag there is, and a shrinker.

A line is a list of pieces, each an option with its values: a sound training, further sound flags, and a few
pieces that are wrong in a way people and scripts are wrong. So most of a line survives parsing, and mistakes
meet each other behind the parser as well.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from mindspeed_core.feature import Flag

Piece = tuple[str, ...]
Line = tuple[Piece, ...]

_SMALL = (
    "--platform cpu;--num-layers 2;--hidden-size 32;--num-attention-heads 4;--seq-length 16;"
    "--micro-batch-size 1;--train-iters 1;--lr 1e-3;--eval-iters 0;--num-workers 0"
)
_BASES = tuple(
    tuple(tuple(piece.split()) for piece in f"{_SMALL};{more}".split(";"))
    for more in (
        "--vocab-size 64;--mock-data",
        "--vocab-size 64;--mock-data;--swiglu;--normalization RMSNorm;--position-embedding-type rope",
        "--vocab-size 64;--mock-data;--num-experts 4;--moe-router-topk 2;--disable-bias-linear",
        "--vocab-size 64;--mock-data;--multi-latent-attention;--position-embedding-type rope",
        "--vocab-size 64;--mock-data;--bf16;--use-distributed-optimizer;--global-batch-size 2",
        "--tokenizer-type NullTokenizer;--vocab-size 64;--mock-data;--group-query-attention",
        "--vocab-size 64;--mock-data;--eval-interval 1;--eval-iters 1;--save PLACE;--load PLACE",
        "--vocab-size 64;--mock-data;--train-samples 8;--global-batch-size 4;--rampup-batch-size 1 1 4",
        "--vocab-size 64;--data-path PLACE",
        "--vocab-size 64;--data-args-path PLACE;--split 9,1,0",
        "--vocab-size 64;--per-split-data-args-path PLACE",
        "--vocab-size 64;--train-data-path 1 PLACE 2 PLACE;--valid-data-path PLACE",
        "--vocab-size 64;--mock-data;--tensor-model-parallel-size 2;--sequence-parallel",
        "--vocab-size 64;--mock-data;--pipeline-model-parallel-size 2;--pipeline-model-parallel-layout Et|tL",
        "--vocab-size 64;--mock-data;--pipeline-model-parallel-size 2;--decoder-first-pipeline-num-layers 1",
        "--vocab-size 64;--mock-data;--num-experts 4;--expert-model-parallel-size 2;--disable-bias-linear",
        "--mock-data;--tokenizer-model PLACE",
        "--mock-data;--tokenizer-type Llama2Tokenizer;--tokenizer-model PLACE",
        "--mock-data;--tokenizer-type GPT2BPETokenizer;--vocab-file PLACE;--merge-file PLACE",
    )
)
_INTEGERS = (
    "0 1 2 3 4 8 -1 7 64 1000 65536 1000000 1000000000 1000000000000 2147483647 2147483648 "
    "9223372036854775807 9223372036854775808 -9223372036854775809 1e3 1.5 0x10 1_000 ٣ abc true None nan inf"
).split()
_NUMBERS = (
    "0 1 0.5 1e-3 2 -1 -0.0 100 1e-400 1e308 1e309 -1e309 nan inf -inf -nan 3.4e38 1e-45 abc 1,5 0x1p-3 None"
).split()
_ODD_TEXTS = (
    "",
    " ",
    "abc",
    "ünïcödé-名前-🙂",
    "\udcff\udcfe",
    "x" * 5000,
    "a\0b",
    "-",
    "--",
    "-1",
    "a,b,,c",
    "1,2,3",
    "[]",
    "{}",
    "null",
    "'; rm -rf /",
    "%s%n{0}",
    "..",
    "\n\t\r",
    "\x1b[31m",
)
_SOUND: dict[Any, tuple[str, ...]] = {int: ("1", "2", "4", "8"), float: ("0.5", "1e-3", "1.0", "0.0")}
_WHOLE = tuple(text for text in _INTEGERS if text.lstrip("-").isdecimal() and -(2**63) <= int(text) < 2**63)
_FINITE = tuple(
    "0 1 0.5 1e-3 2 -1 -0.0 100 1e-400 1e308 -1e308 3.4e38 1e-45 1e20 0.99999999999999999".split()
)
_TEXTS = tuple(text for text in _ODD_TEXTS if not text.startswith("--"))
_MISTAKES = ("value",) * 6 + ("size", "size", "bare", "inline", "many", "misspelt", "unknown", "stray")
_UNKNOWN = (
    "--no-such-flag",
    "--" + "x" * 3000,
    "--ünï",
    "--=",
    "-x",
    "--\udcff",
    "---",
    "--num layers",
    "--hidden-siz",
    "--a\0b",
)
_EXPRESSIONS = (
    "[1]*1000000000",
    "[1]*10**9",
    "([0]*3+[1])*2",
    "[0,1]",
    "[1]*2",
    "[]",
    "[0]*0",
    "[-1,5]",
    "(" * 2000,
    "[" * 300 + "]" * 300,
    "1" * 5000,
    "2",
    "0",
    "__import__('os')",
    "(1,0)",
    "127,0",
    "-5,-5",
    "9" * 30 + ",0",
    "Et|tL",
    "Et*1000000000|L",
    "Et*2|L",
    "E|t|t|L",
    "||||",
    "E,t,,t,L",
)
_LISTS = ("1,2,3", "all", "[1,2]", "1 2", "999999999999", "-1", "0-1000000000", "1:2:3")


class Places:
    """Paths of every kind below a folder: those a flag may name by mistake."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        named = {
            "missing": folder / "missing" / "file",
            "folder": folder / "folder",
            "words": folder / "words.txt",
            "empty": folder / "empty",
            "binary": folder / "binary",
            "list": folder / "list.json",
            "object": folder / "object.json",
            "split": folder / "split.json",
            "deep": folder / "deep.json",
            "fifo": folder / "fifo",
            "locked": folder / "locked",
            "loop": folder / "loop",
        }
        named["folder"].mkdir(exist_ok=True)
        named["words"].write_text("some words\n")
        named["empty"].write_text("")
        named["binary"].write_bytes(bytes(range(256)))
        named["list"].write_text("[1, [2], null]")
        named["object"].write_text('{"train": 5, "model": {"type": "BPE"}, "rope": [1]}')
        named["split"].write_text('{"train": ["1", "x", "y"], "valid": [[]]}')
        named["deep"].write_text("[" * 100_000)
        named["locked"].write_text("locked")
        named["locked"].chmod(0)
        if not named["fifo"].exists():
            os.mkfifo(named["fifo"])
        if not named["loop"].is_symlink():
            named["loop"].symlink_to(named["loop"])
        self.paths = (*map(str, named.values()), "/dev/zero", "/dev/null", str(folder / ("n" * 300)))


class CommandLines:
    """The command lines of a seed: ``line(index)`` is the same wherever and whenever it is made."""

    def __init__(self, flags: Iterable[Flag], folder: Path, seed: int = 0) -> None:
        self._flags = tuple(flags)
        self._places = Places(folder)
        self._seed = seed

    def sound(self) -> Line:
        """Return a line with nothing wrong in it."""
        return _BASES[0]

    def line(self, index: int) -> Line:
        """Return the pieces of one command line; two of three hold no mistake that parsing finds."""
        draw = random.Random(f"{self._seed}:{index}")
        pieces = [
            tuple(draw.choice(self._places.paths) if word == "PLACE" else word for word in piece)
            for piece in draw.choice(_BASES)
        ]
        for _ in range(draw.choice((0, 0, 1, 1, 2, 4))):
            pieces.append(self._sound(draw, draw.choice(self._flags)))
        mistake = self._mistake if index % 3 == 0 else self._extreme
        for _ in range(draw.choice((1, 1, 1, 2, 2, 3, 6))):
            mistake(draw, pieces)
        return tuple(pieces)

    def world_size(self, index: int) -> int:
        """Return the number of ranks that a line is meant for."""
        return random.Random(f"world {self._seed}:{index}").choice((1, 1, 2, 2, 4, 8))

    def _sound(self, draw: random.Random, flag: Flag) -> Piece:
        """Return a flag as it is meant to be given; the value may still be too much for this model."""
        name = draw.choice(flag.options)
        if flag.is_switch:
            return (name,)
        if flag.choices:
            return (name, *(str(draw.choice(flag.choices)) for _ in range(_count(draw, flag))))
        sound = _SOUND.get(flag.type, ("[0,1]", "2", "1,0", "abc"))
        return (name, *(draw.choice(sound) for _ in range(_count(draw, flag))))

    def _extreme(self, draw: random.Random, pieces: list[Piece]) -> None:
        """Give a flag a value of its type that is unlikely to make sense, repeat a flag or forget one."""
        kind = draw.choice(("given", "given", "given", "other", "drop", "twice"))
        position = draw.randrange(len(pieces))
        by_option = {option: flag for flag in self._flags for option in flag.options}
        name = pieces[position][0]
        if kind == "drop":
            del pieces[position]
        elif kind == "twice":
            pieces.append(pieces[position])
        else:
            # The flags of the model and the run meet boundaries far more often than by chance.
            kind = "other" if name not in by_option else kind
            flag = by_option[name] if kind == "given" else draw.choice(self._flags)
            if flag.is_switch:
                pieces.append((draw.choice(flag.options),))
                return
            values = [self._typed(draw, flag) for _ in range(_count(draw, flag))]
            pieces.append((flag.name, *values))

    def _typed(self, draw: random.Random, flag: Flag) -> str:
        if flag.choices:
            return str(draw.choice(flag.choices))
        if flag.type is int:
            return draw.choice(_WHOLE)
        if flag.type is float:
            return draw.choice(_FINITE)
        if flag.type is str:
            return draw.choice(
                draw.choice((_TEXTS, _EXPRESSIONS, _LISTS, self._places.paths, self._places.paths))
            )
        return draw.choice(_EXPRESSIONS)

    def _mistake(self, draw: random.Random, pieces: list[Piece]) -> None:
        """Write something that nobody means: a wrong type, a misspelling, too many or no values."""
        kind = draw.choice(_MISTAKES)
        flag = draw.choice(self._flags)
        name = draw.choice(flag.options)
        position = draw.randrange(len(pieces))
        values = tuple(self._value(draw, flag) for _ in range(_count(draw, flag)))
        if kind == "value":
            pieces.append((name, *values))
        elif kind == "size":
            pieces[position] = (pieces[position][0], draw.choice((*_INTEGERS, *_NUMBERS)))
        elif kind == "bare":
            pieces.append((name,))
        elif kind == "inline":
            pieces.append((f"{name}={self._value(draw, flag)}",))
        elif kind == "many":
            pieces.append((name, *(self._value(draw, flag) for _ in range(draw.choice((2, 3, 50))))))
        elif kind == "misspelt":
            cut = draw.randrange(2, len(name))
            wrong = (name[:cut] + name[cut + 1 :], name + "s", name.replace("-", "_"), name[1:], name.upper())
            pieces.append((draw.choice(wrong), *(() if flag.is_switch else values)))
        elif kind == "unknown":
            pieces.append((draw.choice(_UNKNOWN), *draw.choice(((), values))))
        else:
            pieces.insert(position, (draw.choice(_ODD_TEXTS),))

    def _value(self, draw: random.Random, flag: Flag) -> str:
        pools: list[Sequence[str]] = [_INTEGERS, _NUMBERS, _ODD_TEXTS]
        if flag.type is int:
            pools = [_INTEGERS] * 8 + pools
        elif flag.type is float:
            pools = [_NUMBERS] * 8 + pools
        elif flag.choices:
            pools += [[str(choice) for choice in flag.choices]] * 4
            pools.append([str(choice)[:-1] or "x" for choice in flag.choices])
        else:
            pools += [_EXPRESSIONS, _LISTS, self._places.paths, self._places.paths, _ODD_TEXTS]
        return draw.choice(draw.choice(pools))


def _count(draw: random.Random, flag: Flag) -> int:
    if isinstance(flag.nargs, int):
        return flag.nargs
    return 1 if flag.nargs in (None, "?") else draw.choice((1, 1, 2, 3))


def tokens(line: Line) -> list[str]:
    """Return the words of a line."""
    return [word for piece in line for word in piece]


def shrunk(line: Line, fails: Callable[[Line], bool]) -> Line:
    """Return the least part of a failing line that fails: without pieces, then with shorter values."""
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(line):
            if fails(candidate):
                line, smaller = candidate, True
                break
    return line


def _smaller(line: Line) -> Iterable[Line]:
    for position in reversed(range(len(line))):
        yield line[:position] + line[position + 1 :]
    for position, piece in enumerate(line):
        for word, text in enumerate(piece[1:], 1):
            if len(text) > 1:
                yield (
                    *line[:position],
                    (*piece[:word], text[: len(text) // 2], *piece[word + 1 :]),
                    *line[position + 1 :],
                )
