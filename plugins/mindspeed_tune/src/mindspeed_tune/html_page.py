"""The form of a page: one self-contained HTML file with colours, tables and code.

No script, no font, no file beside it. Colours follow the reader's preference for light or dark, and are told
apart without hue as well: by order, by labels, and by the tables below each picture.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

_LIGHT = {
    "ink": "#1d2430",
    "quiet": "#5b6675",
    "paper": "#ffffff",
    "panel": "#f5f7fa",
    "line": "#d9dfe7",
    "good": "#0b6b3a",
    "goodback": "#e3f5ea",
    "bad": "#b3261e",
    "badback": "#fdeceb",
    "accent": "#1f5fbf",
    "c0": "#3568b8",
    "c1": "#8b9dbd",
    "c2": "#2a8f85",
    "c3": "#7a59b5",
    "c4": "#a98bd6",
    "c5": "#d9822b",
    "c6": "#e8b04a",
    "c7": "#9aa4b1",
    "pad": "#c9d1db",
    "pad2": "#dfe4ea",
    "fwd": "#3568b8",
    "fwd2": "#7fa3dc",
    "bwd": "#2a8f85",
    "bwd2": "#7cc4bc",
    "idle": "#eef1f5",
    "tail0": "#d9822b",
    "tail1": "#7a59b5",
    "near": "#2a8f85",
    "far": "#d9822b",
    "empty": "#e4e8ee",
}
_DARK = {
    "ink": "#e6eaf0",
    "quiet": "#9da8b7",
    "paper": "#12161c",
    "panel": "#1b212a",
    "line": "#313a47",
    "good": "#7ddba4",
    "goodback": "#12301f",
    "bad": "#ff9d94",
    "badback": "#3a1715",
    "accent": "#8ab4f8",
    "c0": "#6c9be6",
    "c1": "#8794ab",
    "c2": "#4cb8ad",
    "c3": "#a384dc",
    "c4": "#c6aef0",
    "c5": "#eb9a4b",
    "c6": "#f2c66b",
    "c7": "#737d8a",
    "pad": "#46505d",
    "pad2": "#333c48",
    "fwd": "#6c9be6",
    "fwd2": "#41659f",
    "bwd": "#4cb8ad",
    "bwd2": "#2f766f",
    "idle": "#1f262f",
    "tail0": "#eb9a4b",
    "tail1": "#a384dc",
    "near": "#4cb8ad",
    "far": "#eb9a4b",
    "empty": "#2b333e",
}
_FILLED = tuple(
    name
    for name in _LIGHT
    if name not in ("ink", "quiet", "paper", "panel", "line", "good", "goodback", "bad", "badback", "accent")
)
_STYLE = """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:1040px;margin:0 auto;padding:28px 24px 64px}
h1{font-size:1.7rem;line-height:1.25;margin:0 0 4px}
h2{font-size:1.2rem;margin:44px 0 6px;padding-top:16px;border-top:1px solid var(--line)}
p{margin:6px 0 12px;max-width:75ch}
.sub{color:var(--quiet);margin:0 0 18px}
.verdict{border-radius:10px;padding:14px 18px;margin:16px 0}
.verdict.ok{background:var(--goodback);border-left:5px solid var(--good)}
.verdict.no{background:var(--badback);border-left:5px solid var(--bad)}
.verdict strong{font-size:1.1rem}
.verdict ul{margin:8px 0 0;padding-left:20px}
.verdict li{margin:6px 0;overflow-wrap:anywhere}
.verdict pre{white-space:pre-wrap;margin:4px 0;font-size:.85rem}
dl.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(165px,1fr));gap:12px;margin:18px 0}
dl.cards div{background:var(--panel);border:1px solid var(--line);border-radius:10px;padding:12px 14px}
dt{color:var(--quiet);font-size:.85rem}
dd{margin:2px 0 0;font-size:1.35rem;font-weight:650}
dd small{display:block;font-size:.8rem;font-weight:400;color:var(--quiet)}
figure{margin:12px 0;overflow-x:auto}
svg[role=img]{width:100%;min-width:640px;height:auto;display:block}
svg text{font:12px system-ui,sans-serif;fill:var(--ink)}
svg text{paint-order:stroke;stroke:var(--paper);stroke-width:3px}
svg text.quiet{fill:var(--quiet)}
svg text.bad{fill:var(--bad);font-weight:600}
svg .grid{stroke:var(--line);stroke-width:1;stroke-dasharray:2 3}
svg .capacity{stroke:var(--bad);stroke-width:2;stroke-dasharray:6 3}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 18px;padding:0;margin:8px 0;font-size:.9rem}
.legend li{display:flex;align-items:center;gap:6px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.88rem;width:100%;margin:8px 0}
caption{text-align:left;color:var(--quiet);padding:4px 0}
th,td{text-align:left;padding:5px 10px;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600;background:var(--panel)}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
code,pre{font-family:ui-monospace,monospace;font-size:.86rem}
td code{overflow-wrap:break-word}
.name{white-space:nowrap}
pre.command{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:12px;
white-space:pre-wrap;overflow-wrap:anywhere}
details{margin:8px 0}
summary{cursor:pointer;color:var(--accent)}
.badge{border-radius:6px;padding:1px 7px;font-size:.8rem;background:var(--panel);border:1px solid var(--line)}
.low{color:var(--bad);font-weight:600}
@media print{main{max-width:none}details{display:block}}
"""


def page(title: str, body: str) -> str:
    """Return a page with a heading and a body of HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title>'
        f"<style>{_colours()}{_STYLE}</style></head>\n<body><main>\n<h1>{escape(title)}</h1>\n{body}\n"
        "</main></body></html>\n"
    )


def _colours() -> str:
    light, dark = (";".join(f"--{name}:{value}" for name, value in one.items()) for one in (_LIGHT, _DARK))
    fills = "".join(f".{name}{{fill:var(--{name})}}" for name in _FILLED)
    return f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}{fills}"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], numeric: int, escaped: bool = False) -> str:
    """Return a table; columns from ``numeric`` on that hold numbers are set to the right."""
    rights = [
        index >= numeric and all(row[index][:1].isdigit() or row[index][:1] in "–-" for row in rows)
        for index in range(len(headers))
    ]
    head = "".join(_cell("th", escape(name), right) for name, right in zip(headers, rights))
    body = "".join(
        "<tr>"
        + "".join(_cell("td", cell if escaped else escape(cell), right) for cell, right in zip(row, rights))
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(tag: str, text: str, right: bool) -> str:
    scope = ' scope="col"' if tag == "th" else ""
    style = ' class="n"' if right else ""
    return f"<{tag}{scope}{style}>{text}</{tag}>"


def code(text: str) -> str:
    """Return a text as code; a dash for none."""
    return f"<code>{escape(text)}</code>" if text else "–"


def path(text: str) -> str:
    """Return the path of a module or of code, which may be broken where one of its parts ends."""
    whole = re.sub(r"(?<=[/.])", "<wbr>", escape(text))
    return f"<code>{whole}</code>" if text else "–"


def lines(text: str) -> str:
    """Return the first line of a text as it is, the others as code below it."""
    first, *others = text.split("\n")
    return escape(first) + (f"<pre>{escape(chr(10).join(others))}</pre>" if others else "")
