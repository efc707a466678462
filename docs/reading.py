"""Takes pictures of ten pages and of ten terminal screens, each at two widths, for ``docs/reading``.

``python docs/reading.py before SITE PROGRAMS`` takes them of an earlier checkout: of its built site, with the
programs that are installed from it in a folder. ``after`` takes those of this one. Pages need Chromium
(``CHROMIUM`` names another program) and Pillow. ``--only pages`` and ``--only screens`` leave the others as
they are, and ``python docs/reading.py page`` writes the page that shows both sides beside each other.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from screens import LINES, drawing
from terminal_screen import shown

FOLDER = Path(__file__).resolve().parent / "reading"
PAGE_WIDTHS, SCREEN_WIDTHS = (1280, 390), (80, 120)
PAGE_HEIGHT = 1000
"""Pixels: what one sees of a page before scrolling, on a large screen."""
COLOURS = (16, 10, 6)
"""Of a picture: text on a plain ground needs no more; fewer where it is larger than `LARGEST`."""
LARGEST = 60_000
"""Bytes of a picture."""
PAGES = {
    "home": "index.html",
    "quick-start": "quick-start.html",
    "training": "training.html",
    "checkpoints": "checkpoints.html",
    "fault-tolerance": "fault-tolerance.html",
    "migration": "migration.html",
    "plugin-manual": "writing-a-plugin.html",
    "feature": "features/mindspeed-cp/context-parallel.html",
    "flags": "reference/flags.html",
    "chinese": "index.zh-CN.html",
}
"""Name of a picture: the page of the site that it shows."""
SIZES = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 128"
BATCH = "--micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --train-iters 8 --eval-iters 0"
RUN = f"--mock-data --platform cpu {SIZES} {BATCH}"
SCREENS = {
    "list": "mindspeed-features list --family memory",
    "show": "mindspeed-features show swap-attention",
    "plan": "mindspeed-features plan -- --normalization RMSNorm --use-fused-rmsnorm --use-flash-attn",
    "refused": "mindspeed-features plan -- --use-fused-rmsnorm --tensor-model-parallel-size x --lrr 1e-3",
    "doctor": "mindspeed-features doctor",
    "bare": "mindspeed-train",
    "help": "mindspeed-train --help",
    "help-flag": "mindspeed-train --help-flag lr-decay-style",
    "training": f"mindspeed-train {RUN} --save ckpt --exit-interval 6",
    "failure": f"mindspeed-train {RUN} --load nowhere --exit-on-missing-checkpoint",
}
"""Name of a drawing: the command that it shows."""


def photograph(site: Path, page: str, width: int, target: Path) -> None:
    """Write the first screen of a page as PNG.

    Raises:
        subprocess.CalledProcessError: the browser failed.
    """
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        taken = Path(folder) / "taken.png"
        # A browser's window is never as narrow as a phone: a page of that width is shown inside of one.
        frame = Path(folder) / "frame.html"
        frame.write_text(
            "<body style='margin:0'>"
            f"<iframe src='{(site / page).resolve().as_uri()}' width={width} height={PAGE_HEIGHT} "
            "style='border:0'></iframe>",
            encoding="utf-8",
        )
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        options += ["--virtual-time-budget=4000", f"--window-size={max(width, 600)},{PAGE_HEIGHT}"]
        subprocess.run(
            [
                os.environ.get("CHROMIUM", "chromium"),
                *options,
                f"--user-data-dir={folder}/profile",
                f"--screenshot={taken}",
                frame.as_uri(),
            ],
            check=True,
            capture_output=True,
            timeout=120,
        )
        picture = Image.open(taken).convert("RGB").crop((0, 0, width, PAGE_HEIGHT))
        for colours in COLOURS:
            picture.quantize(colours, dither=Image.Dither.NONE).save(target, optimize=True)
            if target.stat().st_size <= LARGEST:
                break


def take_pages(side: str, site: Path, names: Collection[str]) -> None:
    """Write the pictures of all named pages that a site has."""
    for name, page in PAGES.items():
        if name not in names:
            continue
        for width in PAGE_WIDTHS:
            target = FOLDER / f"{name}-{width}-{side}.png"
            target.unlink(missing_ok=True)
            if (site / page).is_file():
                photograph(site, page, width, target)
                print(f"{target.name}  {target.stat().st_size // 1024} KB")


def take_screens(side: str, programs: Path, names: Collection[str]) -> None:
    """Write the drawings of the named screens, with the programs of a folder."""
    for name, command in SCREENS.items():
        if name not in names:
            continue
        program, *arguments = shlex.split(command)
        for columns in SCREEN_WIDTHS:
            with tempfile.TemporaryDirectory() as folder:
                lines = shown(
                    [str(programs / program), *arguments],
                    columns,
                    Path(folder),
                    {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
                )
            count = len(lines)
            if count > LINES:
                rest = f"\x1b[2m   ... {count - LINES + 1} lines more ...\x1b[0m"
                lines = [*lines[: LINES - 12], rest, *lines[-11:]]
            target = FOLDER / f"{name}-{columns}-{side}.svg"
            text = drawing([f"\x1b[1m$ {_short(command, columns)}\x1b[0m", *lines], columns)
            target.write_text(text, encoding="utf-8")
            print(f"{target.name}  {count} lines")


def _short(command: str, columns: int) -> str:
    """Return a command that fits into a line."""
    return command if len(command) < columns - 2 else command[: columns - 5] + " …"


def page() -> str:
    """Return the Markdown that shows before and after side by side."""
    lines = [
        "# Pages and screens, before and after",
        "",
        "Ten pages as a browser shows them, 1280 and 390 pixels wide, and ten screens of the programs in",
        "terminals of 80 and 120 columns, before and after the work on what people read.",
        "`python docs/reading.py` takes them anew.",
    ]
    pictures = [
        (f"{name}-{width}", ".png", f"`{path}`", f"{width} px")
        for name, path in PAGES.items()
        for width in PAGE_WIDTHS
    ]
    pictures += [
        (f"{name}-{width}", ".svg", f"`{command}`", f"{width} columns")
        for name, command in SCREENS.items()
        for width in SCREEN_WIDTHS
    ]
    title = ""
    for stem, suffix, of, width in pictures:
        if of != title:
            lines += ["", f"## {stem.rpartition('-')[0]}{' (terminal)' if suffix == '.svg' else ''}", "", of]
            title = of
        lines += ["", f"| before, {width} | after, {width} |", "|---|---|"]
        cells = [
            f"![{of.strip('`')[:60]} {side}, {width}]({stem}-{side}{suffix})"
            if (FOLDER / f"{stem}-{side}{suffix}").is_file()
            else "there was no such page"
            for side in ("before", "after")
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Take the pictures of one side, or write the page; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("side", choices=("before", "after", "page"))
    parser.add_argument("site", type=Path, nargs="?", default=FOLDER.parent.parent / "build" / "site")
    parser.add_argument("programs", type=Path, nargs="?", default=Path(sys.executable).parent)
    parser.add_argument("--only", choices=("pages", "screens"))
    parser.add_argument("--name", nargs="+", metavar="NAME", help="take these alone")
    options = parser.parse_args(arguments)
    FOLDER.mkdir(exist_ok=True)
    if options.side == "page":
        (FOLDER / "index.md").write_text(page(), encoding="utf-8")
        return 0
    if options.only != "screens":
        if not (browser := shutil.which(os.environ.get("CHROMIUM", "chromium"))):
            print("no chromium on the PATH: install one, or name it by CHROMIUM", file=sys.stderr)
            return 1
        print(browser)
        take_pages(options.side, options.site, options.name or PAGES)
    if options.only != "pages":
        take_screens(options.side, options.programs, options.name or SCREENS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
