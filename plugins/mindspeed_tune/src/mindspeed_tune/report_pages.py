"""A search's report as Markdown, as a page, and on the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from mindspeed_core.errors import UserError
from mindspeed_megatron.earlier_files import move_aside
from mindspeed_tune.html_page import page, table
from mindspeed_tune.quantities import duration, percent, size
from mindspeed_tune.search_report import FORMAT

REPORTS = ("search.md", "search.html", "search.json")


@dataclass(frozen=True)
class Section:
    """A part of the report.

    Attributes:
        title: its heading; empty for the first one.
        lines: sentences.
        code: a command line; empty without.
        headers: of its table; empty without.
        rows: of its table.
    """

    title: str
    lines: Sequence[str] = ()
    code: str = ""
    headers: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


def write_reports(report: Mapping[str, Any], folder: Path) -> None:
    """Write a report as Markdown, HTML and JSON.

    Raises:
        UserError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        move_aside(folder, REPORTS)
        (folder / "search.md").write_text(markdown(report), encoding="utf-8")
        (folder / "search.html").write_text(html(report), encoding="utf-8")
        (folder / "search.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--tune-out {folder}: cannot be written ({error}); name another folder") from None


def read_report(path: Path) -> dict[str, Any]:
    """Read the ``search.json`` of a search.

    Raises:
        UserError: it cannot be read, or is none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        known = found["format"]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); name the search.json of a search") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path}: is no report of a search; name its search.json") from None
    if known != FORMAT:
        raise UserError(f"{path}: was written by another version of mindspeed-tune; search again")
    return dict(found)


def markdown(report: Mapping[str, Any]) -> str:
    """Return the report as Markdown."""
    parts = ["# Layouts of a launch"]
    for section in sections(report):
        parts += ["", f"## {section.title}"] if section.title else []
        parts += ["", *section.lines] if section.lines else []
        parts += ["", "```bash", section.code, "```"] if section.code else []
        if section.rows:
            parts += ["", "| " + " | ".join(section.headers) + " |", "|" + "---|" * len(section.headers)]
            parts += ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in section.rows]
    return "\n".join(parts) + "\n"


def html(report: Mapping[str, Any]) -> str:
    """Return the report as one page without other files."""
    body = []
    for section in sections(report):
        body += [f"<h2>{escape(section.title)}</h2>"] if section.title else []
        body += [f"<p>{escape(line)}</p>" for line in section.lines]
        body += [f'<pre class="command">{escape(section.code)}</pre>'] if section.code else []
        body += [table(section.headers, section.rows, 1)] if section.rows else []
    return page(f"Layouts of a launch: {report['ranks']:,} ranks", "\n".join(body))


def print_report(report: Mapping[str, Any], rows: int = 10) -> None:
    """Print what a reader wants to know first."""
    from mindspeed_core.terminal.listing import say
    from mindspeed_megatron.tables import print_table

    for section in list(sections(report))[:2]:
        for line in section.lines:
            say(line)
        if section.code:
            print(f"\n{section.code}\n")
        if section.rows:
            print_table(section.headers, section.rows[:rows], title=section.title)
    for line in report["notes"]:
        say(f"note: {line}", hang=2)


def sections(report: Mapping[str, Any]) -> Iterator[Section]:
    """Yield the parts of a report."""
    best, counts = report["top"][0], report["counts"]
    step = best["measured"] or best["seconds"]
    how = "measured" if best["measured"] else "predicted"
    lines = [
        f"The fastest of {counts['valid']:,} valid layouts on {report['ranks']:,} ranks of "
        f"{report['hardware']}: {duration(step)} a step, {how}"
        + (f", MFU {percent(best['mfu'])}" if best["mfu"] is not None else "")
        + f", {size(best['needed'])} on the fullest device.",
        f"{counts['composed']:,} layouts were ranked by composition, {counts['planned']:,} of the "
        "leading ones by "
        f"dry runs of their own; {counts['refused']:,} were refused.",
    ]
    if report["no_order_by_time"]:
        lines.append(f"No ranking by time: {report['no_order_by_time']}; the order is the predicted one.")
    if report["unverified"]:
        lines.append(f"Assumed, not measured, of this hardware: {', '.join(report['unverified'])}.")
    yield Section("", lines, report["start"])
    yield _top(report)
    yield Section(
        "Where the step goes, and why the others are slower",
        headers=("", "layout", *best["terms"], "slower mostly by"),
        rows=[
            (
                str(number),
                row["label"],
                *(duration(value) for value in row["terms"].values()),
                "–" if row["lost_by"] is None else f"{row['lost_by']['term']}: {_signed(row['lost_by'])}",
            )
            for number, row in enumerate(report["top"], start=1)
        ],
    )
    categories = list(dict.fromkeys(name for row in report["top"] for name in row["categories"]))
    yield Section(
        "Memory of the fullest device",
        headers=("", "layout", *categories, "needed"),
        rows=[
            (
                str(number),
                row["label"],
                *(size(row["categories"].get(name, 0.0)) for name in categories),
                size(row["needed"]),
            )
            for number, row in enumerate(report["top"], start=1)
        ],
    )
    yield Section(
        "Time and memory that no other layout beats together",
        headers=("layout", "step", "memory"),
        rows=[(one["name"], duration(one["seconds"]), size(one["needed"])) for one in report["pareto"]],
    )
    if report.get("only_measured"):
        yield Section(
            "Measured alone: no dry run plans what is active in them",
            headers=("layout", "step", "spread", "command"),
            rows=[
                (one["name"], duration(one["measured"]), percent(one["spread"]), one["start"])
                for one in report["only_measured"]
            ],
        )
    yield from _more(report)
    yield from _trust(report)
    if report["refused"] or report["unranked"]:
        rows = [(str(one["count"]), one["reason"], one["example"]) for one in report["refused"]]
        rows += [(str(one["count"]), f"not ranked: {one['reason']}", "–") for one in report["unranked"]]
        yield Section("Refused", headers=("layouts", "reason", "for instance"), rows=rows)


def _top(report: Mapping[str, Any]) -> Section:
    rows = []
    for number, row in enumerate(report["top"], start=1):
        measured = "–" if row["measured"] is None else duration(row["measured"])
        if row["equal_to_the_first"]:
            measured += ", equal to the first"
        communication = row["terms"]["communication"] + row["terms"]["gradients"]
        rows.append(
            (
                str(number),
                row["label"],
                duration(row["seconds"]),
                measured,
                "–" if row["mfu"] is None else percent(row["mfu"]),
                size(row["needed"]),
                percent(communication / row["seconds"]),
                percent(row["bubble"]),
                row["source"],
            )
        )
    headers = ("", "layout", "step", "measured", "MFU", "memory", "communication", "bubble", "by")
    return Section("The best layouts", headers=headers, rows=rows)


def _more(report: Mapping[str, Any]) -> Iterator[Section]:
    lines = []
    if report["one_gib_more"] is not None:
        one = report["one_gib_more"]
        lines.append(
            f"One GiB more per device would save {percent(one['saves'])} of the step: {one['name']}."
        )
    else:
        lines.append("One GiB more per device would bring nothing.")
    if report["one_node_more"] is not None:
        one = report["one_node_more"]
        lines.append(
            f"One node more, {one['ranks']:,} ranks: {duration(one['seconds'])} a step, "
            f"{one['faster']:.2f} times as "
            f"fast: {one['name']}."
        )
    else:
        lines.append("One node more: no layout divides so many ranks with this batch, or none fits.")
    yield Section("What more would bring", lines)
    if report["features"]:
        yield Section(
            "Features on the best layout, one at a time",
            headers=("flag", "feature", "saves of the step", "saves of memory"),
            rows=[
                (
                    f"{one['flag']} {one['value']}".removesuffix(" True"),
                    one["feature"],
                    percent(one["gain"]),
                    size(one["memory"]),
                )
                for one in report["features"]
            ],
        )


def _trust(report: Mapping[str, Any]) -> Iterator[Section]:
    lines = []
    one = report["composition"]
    if one["compared"]:
        lines.append(
            f"Composed numbers beside {one['compared']} dry runs of the layouts themselves: bytes off by "
            f"{one['bytes']['median']:.2%} (at most {one['bytes']['most']:.2%}), seconds by "
            f"{one['seconds']['median']:.2%} (at most {one['seconds']['most']:.2%})."
        )
    if one.get("families"):
        lines.append(
            f"{one['checked']} of {one['families']} cells of composed layouts were checked by a dry run of a "
            "member: all of those near the front."
        )
    lines += one.get("direct", [])
    one = report["prediction"]
    if one is not None:
        ranks = one["rank_correlation"]
        lines.append(
            f"Predicted steps beside {one['compared']} measured ones: off by "
            f"{one['median_error']:.1%} (median)"
            + (f", rank correlation {ranks:.2f}" if ranks is not None else "")
            + "."
        )
        loads = [(row["load"], row["spread"]) for row in report["top"] if row["load"] is not None]
        load, spread = (max(values) for values in zip(*loads))
        lines.append(
            f"Load of the machine up to {load:.1f}; rounds of one layout differ by up to {spread:.1%}."
        )
    lines += [f"{name} cannot run: {reason}" for name, reason in report["infeasible"].items()]
    lines += report["notes"]
    if lines:
        yield Section("How far the numbers can be trusted", lines)


def _signed(lost: Mapping[str, Any]) -> str:
    return f"{'+' if lost['seconds'] >= 0 else '-'}{duration(abs(lost['seconds']))}"
