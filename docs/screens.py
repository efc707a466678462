"""Draws what the programs print on a terminal into ``docs/screens``: each command at 80 and 120 columns.

``python docs/screens.py`` writes every drawing; with ``--check`` it writes nothing, names stale ones and
exits with 1. The commands run in this process, on a machine that is made up: the plugins of this
repository, a CPU, and fixed answers for ``doctor``, so that the drawings are the same wherever they are made.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from html import escape
from pathlib import Path
from unittest.mock import patch

from generate import tree_registry

from mindspeed_core.cli.features import main as features
from mindspeed_core.discovery.entry_points import Installed, Source
from mindspeed_core.platforms.platform import Availability
from mindspeed_core.registry import Registry
from mindspeed_megatron.doctor import facts as doctor_facts
from mindspeed_train.program import main as train

FOLDER = Path(__file__).resolve().parent / "screens"
WIDTHS = (80, 120)
LINES = 44
"""Most lines of a drawing; of a longer output the middle is left out."""
LLAMA = (
    "--num-layers 4 --swiglu --normalization RMSNorm --use-fused-rmsnorm --use-fused-swiglu --use-flash-attn"
)
SCREENS = {
    "list": "mindspeed-features list",
    "list-flags": "mindspeed-features list --family cp --flags",
    "show": "mindspeed-features show flash-attn",
    "plan": f"mindspeed-features plan -- {LLAMA}",
    "doctor": "mindspeed-features doctor",
    "patches": "mindspeed-features patches",
    "graph": "mindspeed-features graph",
    "train-help": "mindspeed-train --help",
    "train-help-flag": "mindspeed-train --help-flag lr-decay-style",
}
"""Name of a drawing: the command that it shows."""

_COLOURS = {"1": "b", "2": "d", "32": "g", "33": "y", "31": "r", "36": "n"}
_STYLE = (
    "rect{fill:#0d1117}text{font:14px ui-monospace,Menlo,Consolas,monospace;fill:#e6edf3;white-space:pre}"
    ".b{font-weight:bold}.d{fill:#8b949e}.g{fill:#3fb950}.y{fill:#d29922}.r{fill:#f85149}.n{fill:#39c5cf}"
)
_HEIGHT, _WIDTH, _MARGIN = 19, 8.5, 14


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        """Return True."""
        return True


def facts(registry: Registry, host: str = "", begin: object = None) -> doctor_facts.Facts:
    """Return what `doctor` would have found on the machine that is made up."""
    versions = {"torch": "2.13.0+cpu", "megatron-core": "0.16.1", "pluggy": "1.6.0", "numpy": "2.4.6"}
    torch = {"torch": versions["torch"], "backends": {"gloo": True}, "megatron": "ok", "helpers_cpp": "ok"}
    return doctor_facts.Facts(
        python="3.12.4",
        versions=versions,
        torch=torch,
        environment={},
        open_files=1024,
        shared_memory=8 << 30,
        cpus=8,
        hosts=tuple(registry.host_names()),
        platforms={"cpu": (True, "every machine has a CPU"), "npu": (False, "torch_npu is not installed")},
    )


@contextmanager
def made_up_machine() -> Iterator[None]:
    """Let commands find the plugins of this repository alone, on a machine without a device."""
    registry = tree_registry()
    ours = {"mindspeed-core", *registry.distributions()}

    everything = Installed.sources

    def of_the_tree(installed: Installed, *groups: str) -> list[Source]:
        return [source for source in everything(installed, *groups) if source.dist in ours]

    def absent(reason: str) -> classmethod[type, [], Availability]:
        return classmethod(lambda cls: Availability(False, reason))

    with ExitStack() as stack:
        for change in (
            patch.object(Registry, "discover", lambda: registry),
            patch.object(Installed, "sources", of_the_tree),
            patch.object(doctor_facts, "collect", facts),
            patch.object(registry.platform("cuda"), "probe", absent("no NVIDIA device file in /dev")),
            patch.object(registry.platform("npu"), "probe", absent("torch_npu is not installed")),
        ):
            stack.enter_context(change)
        yield


def printed(command: str, columns: int) -> list[str]:
    """Return the lines that a command prints on a terminal of so many columns, with its escape sequences."""
    program, *arguments = shlex.split(command)
    run: Callable[[Sequence[str]], int] = {"mindspeed-features": features, "mindspeed-train": train}[program]
    terminal = Terminal()
    setting = {"COLUMNS": str(columns), "TERM": "xterm-256color", "NO_COLOR": "", "FORCE_COLOR": ""}
    with patch.dict(os.environ, setting), redirect_stdout(terminal):
        run(arguments)
    lines = terminal.getvalue().splitlines()
    if len(lines) > LINES:
        lines = [*lines[: LINES - 12], "\x1b[2m   ...\x1b[0m", *lines[-11:]]
    return [f"\x1b[1m$ {command}\x1b[0m", *lines]


def drawing(lines: Sequence[str], columns: int) -> str:
    """Return the SVG of lines with escape sequences."""
    longest = max(columns, *(len(re.sub(r"\x1b\[\d+m", "", line)) for line in lines))
    wide, high = round(longest * _WIDTH + 2 * _MARGIN), len(lines) * _HEIGHT + 2 * _MARGIN
    body = [
        f'<text x="{_MARGIN}" y="{_MARGIN + 14 + number * _HEIGHT}">{_spans(line)}</text>'
        for number, line in enumerate(lines)
        if line
    ]
    size = f'viewBox="0 0 {wide} {high}" width="{wide}" height="{high}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve" {size}>'
    back = f'<style>{_STYLE}</style><rect width="{wide}" height="{high}" rx="8"/>'
    return "\n".join((head, back, *body, "</svg>")) + "\n"


def _spans(line: str) -> str:
    """Return the text of a line, its coloured parts in elements of their own."""
    spans, style = [], ""
    for part in re.split(r"(\x1b\[\d+m)", line):
        if part.startswith("\x1b["):
            style = _COLOURS.get(part[2:-1], "")
        elif part:
            text = escape(part, quote=False)
            spans.append(f'<tspan class="{style}">{text}</tspan>' if style else text)
    return "".join(spans)


def render() -> dict[Path, str]:
    """Return every drawing by its path."""
    with made_up_machine():
        return {
            FOLDER / f"{name}-{columns}.svg": drawing(printed(command, columns), columns)
            for name, command in SCREENS.items()
            for columns in WIDTHS
        }


def main(arguments: Sequence[str]) -> int:
    """Write or check the drawings; the exit status."""
    drawings = render()
    stale = [
        path
        for path, text in drawings.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    stale += sorted({*FOLDER.glob("*.svg")} - set(drawings))
    if "--check" in arguments:
        for path in stale:
            print(
                f"{path.relative_to(FOLDER.parent.parent)} is not up to date: run docs/screens.py",
                file=sys.stderr,
            )
        return 1 if stale else 0
    FOLDER.mkdir(exist_ok=True)
    for path in stale:
        path.unlink() if path not in drawings else path.write_text(drawings[path], encoding="utf-8")
        print(path.relative_to(FOLDER.parent.parent))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
