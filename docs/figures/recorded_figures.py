"""Figures of what real runs recorded: memory, messages, overlap, losses, loads of experts, and a plan."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from shapes import Drawing

HERE = Path(__file__).resolve().parent
PLAN = HERE.parents[1] / "examples" / "plan_before_launch" / "plan.md"
UNITS = {"B": 2.0**-30, "KiB": 2.0**-20, "MiB": 2.0**-10, "GiB": 1.0}


def recorded(name: str) -> Any:
    """Return what ``record.py`` wrote under a name."""
    return json.loads((HERE / "data" / f"{name}.json").read_text(encoding="utf-8"))


def _axes(
    drawing: Drawing, box: tuple[float, float, float, float], top: float, unit: str, below: str
) -> None:
    """Draw a frame with numbers at its left side, and what is below it."""
    left, upper, right, lower = box
    for part in range(5):
        y = lower - (lower - upper) * part / 4
        drawing.path(((left, y), (right, y)))
        drawing.text(left - 6, y + 4, f"{top * part / 4:.3g}", "q", "end")
    drawing.text(left, upper - 10, unit, "q")
    drawing.text(right, lower + 20, below, "q", "end")


def _rounded(value: float) -> float:
    """The next multiple of four: the axis has four parts."""
    return 4.0 * math.ceil(value / 4)


def memory_figure() -> str:
    """Draw the bytes of tensors over one step, a line for each way to save some."""
    sides = recorded("memory")["sides"]
    plain = sides["nothing"]["peak"]
    peaks = ", ".join(f"{name} {side['peak'] / plain:.0%}" for name, side in sides.items())
    drawing = Drawing(
        "Memory over a step, with and without features that save some", f"Peaks: {peaks} of the first."
    )
    left, upper, right, lower = 44.0, 30.0, 640.0, 250.0
    top = _rounded(plain / 2**20)
    _axes(
        drawing, (left, upper, right, lower), top, "MiB alive beyond model and optimizer", "one training step"
    )
    for number, side in enumerate(sides.values()):
        curve = side["curve"]
        wide = (right - left) / (len(curve) - 1)
        points = [
            (left + wide * at, lower - value / 2**20 / top * (lower - upper))
            for at, value in enumerate(curve)
        ]
        drawing.path(points, f"s{number}")
    names = [
        (f"c{number}", f"{name}: peak {side['peak'] / 2**20:.1f} MiB")
        for number, (name, side) in enumerate(sides.items())
    ]
    return drawing.svg(drawing.legend(lower + 44, names, left))


def ring_figure() -> str:
    """Draw who sends keys and values to whom in ring attention, round by round."""
    ranks = recorded("exchanges")["ring"]
    rounds = _rounds(ranks)
    each = rounds[0][0][1] if rounds else 0
    drawing = Drawing(
        "Messages of ring attention on four ranks",
        f"{len(rounds)} rounds; in each, every rank sends {each / 1024:g} KiB of keys and values to the next "
        "one while it computes with those at hand.",
        560,
    )
    place = [70 + 140 * rank for rank in range(len(ranks))]
    for rank, x in enumerate(place):
        drawing.text(x, 16, f"rank {rank}", "h", "middle")
    y = 30.0
    for number, sent in enumerate(rounds):
        for rank, x in enumerate(place):
            drawing.rect(x - 46, y, 92, 24, f"c{(rank - number) % len(ranks)}")
            drawing.text(x, y + 16, f"keys of {(rank - number) % len(ranks)}", "on", "middle")
        for rank, (peer, _) in enumerate(sent):
            drawing.path(((place[rank], y + 26), (place[peer], y + 66)), "i", arrow=True)
        drawing.text(560, y + 50, f"{sent[0][1] / 1024:g} KiB each", "q", "end")
        y += 70
    for rank, x in enumerate(place):
        drawing.rect(x - 46, y, 92, 24, f"c{(rank - len(rounds)) % len(ranks)}")
        drawing.text(x, y + 16, f"keys of {(rank - len(rounds)) % len(ranks)}", "on", "middle")
    return drawing.svg(y + 30)


def _rounds(ranks: list[list[dict[str, Any]]]) -> list[list[tuple[int, int]]]:
    """The messages of every rank, round by round: whom to, and how many bytes."""
    sent: list[dict[Any, tuple[int, int]]] = []
    for calls in ranks:
        batches: dict[Any, tuple[int, int]] = {}
        for number, call in enumerate(calls):
            if call["operation"] == "isend":
                key = number if call["batch"] is None else call["batch"]
                peer, size = batches.get(key, (call["peer"], 0))
                batches[key] = peer, size + call["bytes"]
        sent.append(batches)
    rows = [list(batches.values()) for batches in sent]
    return [[row[number] for row in rows] for number in range(len(rows[0]))]


def ulysses_figure() -> str:
    """Draw what each rank holds before and after the all-to-alls of Ulysses attention."""
    ranks = recorded("exchanges")["ulysses"]
    *first, last = [call["bytes"] / 1024 for call in ranks[0] if call["operation"].startswith("all_to_all")]
    drawing = Drawing(
        "All-to-alls of Ulysses attention on four ranks",
        f"Each rank puts in {sum(first):g} KiB of query, key and value, and {last:g} KiB of the result "
        "behind attention: a quarter of the tokens with every head becomes all tokens of one head, and back.",
        560,
    )
    number = len(ranks)
    for rank in range(number):
        drawing.text(70 + 140 * rank, 16, f"rank {rank}", "h", "middle")
    states = (
        ("a quarter of the tokens, every head (across: tokens, down: heads)", False),
        ("all tokens of one head: attention is computed here", True),
        ("a quarter of the tokens, every head", False),
    )
    moves = (
        f"{len(first)} all-to-alls, {sum(first):g} KiB from each",
        f"one all-to-all, {last:g} KiB from each",
    )
    y, side = 28.0, 16.0
    for at, (state, whole) in enumerate(states):
        for rank in range(number):
            left = 70 + 140 * rank - side * number / 2
            for token in range(number):
                for head in range(number):
                    held = head == rank if whole else token == rank
                    kind = f"c{head}" if held else "box"
                    drawing.rect(left + token * side, y + head * side, side - 1, side - 1, kind)
        y += side * number + 18
        drawing.text(280, y - 2, state, "q", "middle")
        if at < len(moves):
            drawing.path(((280, y + 6), (280, y + 34)), "i", arrow=True)
            drawing.text(292, y + 25, moves[at])
            y += 48
    return drawing.svg(y + 8)


def overlap_figure() -> str:
    """Draw computation and communication of an expert layer on one clock, in both orders."""
    sides = {name: _on_the_clock(side) for name, side in recorded("overlap").items()}
    longest = max(end for _, _, end in sides.values())
    first, second = (end for _, _, end in sides.values())
    drawing = Drawing(
        "An expert layer, with its all-to-alls exposed and overlapped",
        f"Overlapped it takes {second / first:.0%} of the time, when an exchange of rows takes as long as "
        "one product of the shared experts.",
    )
    left = 104.0
    scale = (drawing.width - left) / longest
    y = 0.0
    for name, (computed, sent, end) in sides.items():
        drawing.text(0, y + 14, name, "h")
        for row, (label, spans, kind) in enumerate(
            (("computation", computed, "c0"), ("all-to-all", sent, "c2"))
        ):
            top = y + 24 + row * 28
            drawing.text(0, top + 15, label, "q")
            for begin, stop in spans:
                drawing.rect(left + begin * scale, top, max((stop - begin) * scale - 0.5, 0.8), 22, kind)
        drawing.path(((left + end * scale, y + 20), (left + end * scale, y + 78)), "s4")
        y += 94
    drawing.text(left, y, "forward and backward pass of one layer on the first of two ranks", "q")
    return drawing.svg(y + 10)


def _on_the_clock(side: dict[str, Any]) -> tuple[list[tuple[float, float]], list[tuple[float, float]], float]:
    """Spans of computation, of communication, and the end; as `mindspeed_megatron` has its virtual clock."""
    events = []
    for number, call in enumerate(side["calls"]):
        events += [(call["launch_event"], call["launched"], False, number)]
        events += [(call["wait_event"], call["waited"], True, number)]
    late, free, at = 0.0, 0.0, 0.0
    ends: dict[int, float] = {}
    computed, sent = [], []
    for _, flops, waits, number in sorted(events):
        now = flops + late
        if now > at:
            computed.append((at, now))
        at = now
        if not waits:
            begin = max(now, free)
            ends[number] = free = begin + side["calls"][number]["duration"]
            sent.append((begin, free))
        else:
            waited = max(0.0, ends[number] - now)
            late += waited
            at = now + waited
    end = side["computed"] + late
    if end > at:
        computed.append((at, end))
    return computed, sent, end


def losses_figure() -> str:
    """Draw the loss of the quick start over its steps."""
    runs = recorded("losses")
    every = [point for run in runs.values() for point in run]
    drawing = Drawing(
        "Loss of the quick start",
        f"From {every[0][1]:.2f} to {every[-1][1]:.2f} in {every[-1][0]} steps; the second half was resumed "
        "on one process from the checkpoint of two.",
    )
    left, upper, right, lower = 44.0, 30.0, 640.0, 230.0
    top = _rounded(max(loss for _, loss in every))
    steps = every[-1][0]
    _axes(drawing, (left, upper, right, lower), top, "loss", f"step {steps}")
    for number, run in enumerate(runs.values()):
        points = [
            (left + (right - left) * step / steps, lower - (lower - upper) * loss / top) for step, loss in run
        ]
        drawing.path(points, f"s{number}")
    names = [("c0", "two processes, tensor parallelism 2"), ("c1", "resumed on one process")]
    return drawing.svg(drawing.legend(lower + 44, names, left))


def loads_figure() -> str:
    """Draw the tokens of each expert over the steps, as a multiple of the mean."""
    data = recorded("loads")
    steps = data["loads"]
    experts = len(steps[0])
    shares = [[load * experts / (sum(step) or 1) for load in step] for step in steps]
    first, last = max(shares[0]), max(shares[-1])
    drawing = Drawing(
        "Tokens of each expert over a training",
        f"{experts} experts, {len(steps)} steps: the fullest expert has {first:.2f} times the mean in the "
        f"first step and {last:.2f} in the last.",
    )
    left, tall = 70.0, 18
    wide = (drawing.width - left) / len(steps)
    drawing.text(0, 14, f"layer {data['layer']}: tokens of an expert, as a multiple of the mean", "h")
    for expert in range(experts):
        y = 24 + expert * tall
        drawing.text(0, y + 13, f"expert {expert}", "q")
        for at, step in enumerate(shares):
            share = step[expert]
            kind = "c4" if share > 1.5 else "c2" if share > 1.15 else "c1" if share > 0.85 else "c0"
            drawing.rect(left + at * wide, y, wide, tall - 2, kind, f"{share:.2f}")
    y = 24 + experts * tall + 18
    drawing.text(drawing.width, y, f"step {len(steps)}", "q", "end")
    names = [("c0", "below 0.85"), ("c1", "0.85 to 1.15"), ("c2", "to 1.5"), ("c4", "above 1.5")]
    return drawing.svg(drawing.legend(y, names, left))


def plan_figure() -> str:
    """Draw the memory of the stages of the planned example, and what its devices have."""
    text = PLAN.read_text(encoding="utf-8").partition("## Memory of the fullest rank of each kind")[2]
    rows = [
        line.strip("| ").split(" | ") for line in text.split("\n## ")[0].splitlines() if line.startswith("|")
    ]
    head, body = rows[0], rows[2:]
    parts = ("parameters", "gradients", "main parameters", "optimizer state", "activations", "other")
    stages = [(row[0], {name: _gib(row[head.index(name)]) for name in head[2:]}) for row in body]
    capacity = sum(stages[0][1][name] for name in ("allocator", "beside it", "headroom"))
    needed = [of["allocator"] + of["beside it"] for _, of in stages]
    drawing = Drawing(
        "Memory of a planned launch, stage by stage",
        "; ".join(f"{name} needs {need:.1f} GiB" for (name, _), need in zip(stages, needed, strict=True))
        + f" of {capacity:.0f} GiB.",
    )
    left = 104.0
    scale = (drawing.width - left - 8) / capacity
    for row, (name, of) in enumerate(stages):
        y, x = 10 + row * 36, left
        drawing.text(0, y + 17, name, "q")
        for number, part in enumerate(parts):
            drawing.rect(x, y, of[part] * scale, 24, f"c{number}", f"{part}: {of[part]:.2f} GiB")
            x += of[part] * scale
        beside = needed[row] - sum(of[part] for part in parts)
        drawing.rect(x, y, beside * scale, 24, "box", f"allocator and beside it: {beside:.2f} GiB")
        drawing.text(x + beside * scale + 6, y + 17, f"{needed[row]:.1f} GiB")
    y = 10 + 36 * len(stages)
    drawing.path(((left + capacity * scale, 4), (left + capacity * scale, y)), "s4")
    drawing.text(drawing.width, y + 14, f"the device has {capacity:.0f} GiB", "q", "end")
    names = [(f"c{number}", part) for number, part in enumerate(parts)]
    return drawing.svg(drawing.legend(y + 40, [*names, ("box", "allocator and beside it")], left))


def _gib(text: str) -> float:
    number, unit = re.fullmatch(r"([\d.,]+) (\w+)", text.strip()).groups()  # type: ignore[union-attr]
    return float(number.replace(",", "")) * UNITS[unit]
