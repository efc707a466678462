"""The line of a logged step: whole where it fits, else in shorter words, without what matters least."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Numbers that the line shows in its own words, or that have lines of their own.
_SHOWN = (
    *("step", "loss", "learning_rate", "grad_norm", "tokens_per_second", "step_ms", "peak_memory_bytes"),
    *("tflops_per_device", "hardware_tflops_per_device", "share_of_peak"),
    *("straggler_rank", "straggler_ratio", "memory_source", "skipped"),
)


@dataclass(frozen=True)
class _Part:
    """One number in a line.

    Attributes:
        whole: its words where there is room.
        short: fewer words.
        expendable: of several parts the one with the largest number is left out first, 0 never.
    """

    whole: str
    short: str
    expendable: int = 0


def format_step(numbers: Mapping[str, Any], total: int, columns: int | None = None) -> str:
    """Format one logged step as one line.

    Args:
        numbers: of the step, under their names of ``metrics.jsonl``.
        total: steps of the whole run.
        columns: of the terminal; None where no line is too long.
    """
    parts = list(_parts(numbers, total))
    line = " | ".join(part.whole for part in parts)
    if columns is None or len(line) <= columns:
        return line
    while True:
        line = " | ".join(part.short for part in parts)
        least = max(parts, key=lambda part: part.expendable)
        if len(line) <= columns or not least.expendable:
            return line
        parts.remove(least)


def memory(size: float) -> str:
    """Return bytes in MiB, or in GiB from one on."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"


def _parts(numbers: Mapping[str, Any], total: int) -> Iterator[_Part]:
    step = f"step {numbers['step']:>{len(str(total))}}/{total}"
    yield _Part(step, step)
    if (loss := numbers.get("loss")) is not None:
        yield _Part(f"loss {loss:.6f}", f"loss {loss:.4f}")
    if (rate := numbers.get("learning_rate")) is not None:
        yield _Part(f"lr {rate:.3e}", f"lr {rate:.1e}", 5)
    if (norm := numbers.get("grad_norm")) is not None:
        yield _Part(f"grad norm {norm:.4f}", f"norm {norm:.3g}", 4)
    if (speed := numbers.get("tokens_per_second")) is not None:
        yield _Part(f"{speed:,.0f} tokens/s", f"{speed:,.0f} tok/s", 1)
    if "tflops_per_device" in numbers:
        yield _throughput(numbers)
    yield _Part(f"{numbers['step_ms']:.1f} ms", f"{numbers['step_ms']:.0f} ms", 6)
    used = memory(numbers["peak_memory_bytes"])
    yield _Part(used, used, 2)
    if numbers.get("skipped"):
        yield _Part("update skipped", "skipped")
    for name, value in numbers.items():
        if name not in _SHOWN and isinstance(value, (int, float)):
            yield _Part(f"{name} {value:.6g}", f"{name} {value:.4g}", 7)


def _throughput(numbers: Mapping[str, Any]) -> _Part:
    figure = f"{numbers['tflops_per_device']:.3g} TFLOP/s"
    text, short = f"{figure} per device", figure
    if "hardware_tflops_per_device" in numbers:
        text += f" ({numbers['hardware_tflops_per_device']:.3g} with recompute)"
    if "share_of_peak" in numbers:
        text += f", {numbers['share_of_peak']:.1%} of peak"
        short = f"{numbers['share_of_peak']:.1%} MFU"
    return _Part(text, short, 3)
