"""A plan as one self-contained HTML page: pictures, tables, and what to do.

No script, no font, no file beside it. Colours follow the reader's preference for light or dark, and are told
apart without hue as well: by order, by labels, and by the tables below each picture.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape

from mindspeed_tune.charts import groups_chart, legend, memory_chart, timeline_chart
from mindspeed_tune.launch_plan import LaunchPlan
from mindspeed_tune.quantities import count, duration, percent, size
from mindspeed_tune.record import LargeTensor

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


def html_report(plan: LaunchPlan) -> str:
    """Return the page."""
    layout = plan.records[0].layout
    title = f"Launch plan: {layout.world_size:,} ranks"
    body = "\n".join(
        part
        for section in (_head, _memory, _timeline, _groups, _orders, _advice, _largest, _limits)
        for part in section(plan)
    )
    return page(title, body)


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


def _head(plan: LaunchPlan) -> Iterator[str]:
    layout, step = plan.records[0].layout, plan.step
    m = plan.records[0].microbatches
    yield (
        f'<p class="sub">{escape(str(layout))} · {count(m)} micro-batch{"es" if m != 1 else ""} a step · '
        f"{len(plan.kinds)} kinds of ranks, {len(plan.records)} ranks run on shapes alone</p>"
    )
    if plan.ok:
        fits = f"Every kind of rank fits into {escape(plan.hardware.name)}" if plan.hardware else "Consistent"
        yield (
            f'<div class="verdict ok"><strong>{fits}.</strong> The order of {count(plan.order.compared)} '
            f"calls agrees between {plan.order.pairs} pairs of ranks.</div>"
        )
    else:
        items = "".join(f"<li>{_lines(problem)}</li>" for problem in plan.problems)
        yield f'<div class="verdict no"><strong>This launch would fail.</strong><ul>{items}</ul></div>'
    fullest = plan.fullest.fullest
    capacity = "" if fullest.capacity is None else f"of {size(fullest.capacity)}, {plan.fullest.kind.name}"
    cards = [("memory of the fullest rank", size(fullest.needed), capacity or plan.fullest.kind.name)]
    if step.seconds is not None:
        cards += [
            ("step, estimated", duration(step.seconds), f"{duration(step.update)} of it updating"),
            (
                "MFU, estimated",
                percent(step.mfu) if step.mfu is not None else "–",
                "model operations of peak",
            ),
            ("tokens per second", count(round(step.tokens / step.seconds)), "whole launch"),
        ]
    cards.append(("pipeline bubble", percent(step.timeline.bubble), "stages waiting for each other"))
    inner = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for name, value, note in cards
    )
    yield f'<dl class="cards">{inner}</dl>'
    yield (
        f'<details><summary>Command and active features</summary><pre class="command">'
        f"{escape(' '.join(plan.command))}</pre><p>"
        + (escape(", ".join(plan.records[0].features)) or "no feature is active")
        + "</p></details>"
    )


def _memory(plan: LaunchPlan) -> Iterator[str]:
    stages = plan.stages()
    categories = list(dict.fromkeys(name for one in stages for name in one.categories))
    shown = {f"c{index}": name for index, name in enumerate(categories)}
    shown |= {"pad": "allocator's rounding, estimated"}
    if any(one.outside for one in stages):
        shown |= {"pad2": "runtime and communication buffers"}
    yield "<h2>Memory by category per pipeline stage</h2>"
    yield "<p>At the highest peak of a step, on the fullest rank of each stage. Tensors are exact bytes.</p>"
    yield legend(shown)
    yield f"<figure>{memory_chart(stages, categories)}</figure>"
    headers = ["stage", *categories, "exact", "with allocator", "headroom", "peak in"]
    rows = [
        [
            str(one.stage),
            *(size(one.categories.get(name, 0.0)) for name in categories),
            size(one.exact),
            size(one.needed),
            "–" if one.headroom is None else size(one.headroom),
            one.phase,
        ]
        for one in stages
    ]
    yield f"<details><summary>Numbers</summary>{table(headers, rows, numeric=len(headers) - 1)}</details>"
    modules = plan.fullest.fullest.modules
    if modules:
        rows = [[name, size(amount)] for name, amount in list(modules.items())[:12]]
        yield "<details><summary>Activations by module, fullest kind</summary>"
        yield table(["module", "kept for backward"], rows, numeric=2) + "</details>"


def _timeline(plan: LaunchPlan) -> Iterator[str]:
    step = plan.step
    measured = step.seconds is not None
    tail = [("gradients", step.gradients), ("update", step.update)] if measured else []
    yield "<h2>Timeline of a step</h2>"
    how = "from the hardware file's peaks and efficiencies" if measured else "by operations, without hardware"
    yield f"<p>One lane for each pipeline stage; light areas are waiting. Lengths are estimated {how}.</p>"
    names = {"fwd": "forward", "bwd": "backward", "idle": "waiting"}
    if plan.records[0].layout.vpp > 1:
        names = {
            "fwd": "forward, even chunks",
            "fwd2": "forward, odd chunks",
            **names,
            "bwd2": "backward, odd",
        }
    if tail:
        names |= {"tail0": "gradients", "tail1": "update"}
    yield legend(names)
    yield f"<figure>{timeline_chart(step.timeline, measured, tail)}</figure>"
    if measured and step.seconds:
        whole = step.seconds
        waits = step.timeline.seconds - step.compute - step.communication
        parts = [
            ("operators of the busiest stage", step.compute),
            ("collectives within its passes", step.communication),
            ("waiting of that stage", waits),
            ("exchange of gradients", step.gradients),
            ("update with exchange of parameters", step.update),
        ]
        rows = [
            [name, duration(max(0.0, length)), percent(max(0.0, length) / whole)] for name, length in parts
        ]
        yield table(["where the step goes", "time", "share"], rows, numeric=2)


def _groups(plan: LaunchPlan) -> Iterator[str]:
    rank = plan.fullest.record.rank
    used = [one for one in plan.groups if one.used and one.of_rank == rank]
    layout = plan.records[0].layout
    yield "<h2>Groups on nodes</h2>"
    yield (
        f"<p>Nodes have {plan.devices} ranks. Filled squares are the devices of a node that a group uses; "
        f"groups that cross nodes share the slower links. These are those of rank {rank:,}.</p>"
    )
    yield legend({"near": "within a node", "far": "across nodes"})
    if used:
        shown = sorted(used, key=lambda one: -one.bytes)[:14]
        yield f"<figure>{groups_chart(shown, plan.devices, layout.world_size)}</figure>"
    rows = [
        [
            one.group.name,
            count(one.group.ranks.size),
            str(one.group.ranks),
            "yes" if one.crosses_nodes else "no",
            count(round(one.calls)),
            size(one.bytes),
        ]
        for one in plan.groups
    ]
    headers = ["group, in order of creation", "ranks", "which", "crosses nodes", "calls", "input bytes"]
    yield f"<details><summary>All {len(rows)} groups</summary>{table(headers, rows, numeric=1)}</details>"
    forms = [
        [
            kind.kind.name,
            one.expected.group,
            one.expected.operation,
            count(one.expected.calls),
            count(round(one.calls)),
            size(one.expected.bytes),
            size(one.bytes),
            percent(one.difference),
            one.expected.form,
        ]
        for kind in plan.kinds
        for one in kind.forms
    ]
    if forms:
        headers = ["kind", "group", "operation", "calls by form", "counted", "bytes by form", "counted"]
        headers += ["difference", "closed form"]
        yield f"<details><summary>Closed forms beside counts</summary>{table(headers, forms, 3)}</details>"


def _orders(plan: LaunchPlan) -> Iterator[str]:
    order = plan.order
    yield "<h2>Order of communication</h2>"
    if order.differences or order.waiting:
        for one in (*map(str, order.differences), *order.waiting):
            yield f'<div class="verdict no">{_lines(one)}</div>'
    else:
        yield (
            f"<p>{count(order.compared)} calls of {order.pairs} pairs of ranks have the same group, "
            "operation, bytes and dtype in the same order, and every send meets its receive.</p>"
        )
    if order.unchecked:
        yield f"<p>One member of each was run, so not compared: {escape(', '.join(order.unchecked))}.</p>"


def _advice(plan: LaunchPlan) -> Iterator[str]:
    kind = plan.fullest
    if kind.fullest.advice:
        yield "<h2>What would help</h2>"
        yield f"<p>For {escape(kind.kind.name)}, the fullest; savings are estimated, plan again.</p>"
        rows = [
            [
                _code(one.flags),
                f'<span class="name">{escape(one.feature or "megatron-core")}</span>',
                size(one.saves),
                escape(one.why),
            ]
            for one in kind.fullest.advice
        ]
        yield table(["flags", "feature", "saves", "why"], rows, numeric=1, escaped=True)


def _largest(plan: LaunchPlan) -> Iterator[str]:
    kind = plan.fullest
    memory = kind.fullest
    if not memory.largest:
        return
    yield "<h2>The peak, and the largest tensors at it</h2>"
    if memory.operator:
        places = "".join(f"<br>{_path(line)}" for line in memory.stack[:4])
        yield (
            f"<p>Of {escape(kind.kind.name)}, in {escape(memory.phase)}, while {_code(memory.operator)} "
            f"runs:{places}</p>"
        )
    rows = [
        [
            size(one.bytes),
            escape(one.category),
            _path(one.module),
            "<br>".join(map(_path, (one.operator, *one.stack[:3]))),
            escape(", ".join(_would_remove(plan, one)) or "–"),
        ]
        for one in memory.largest
    ]
    headers = ["bytes", "category", "module", "made by", "kept smaller by"]
    yield table(headers, rows, numeric=0, escaped=True)


def _would_remove(plan: LaunchPlan, tensor: LargeTensor) -> list[str]:
    """Return the features that keep less of the module which made a tensor."""
    advised = {one.feature for one in plan.fullest.fullest.advice}
    return [
        relief.feature
        for relief in plan.fullest.record.reliefs
        if relief.feature in advised and tensor.category == "activations" and relief.concerns(tensor.module)
    ]


def _limits(plan: LaunchPlan) -> Iterator[str]:
    yield "<h2>What these numbers are</h2><ul>"
    for name, reason in plan.incomplete.items():
        yield f"<li><strong>Incomplete:</strong> {escape(name)}: {escape(reason)}</li>"
    for rank, difference in plan.differing.items():
        yield f"<li>Rank {rank} keeps {count(difference)} bytes more than its kind: an uneven division.</li>"
    yield "<li>Bytes of tensors are counted; layers and micro-batches that repeat are multiplied.</li>"
    yield "<li>Not counted: data loaders, and what a communication library takes inside the device.</li>"
    if plan.hardware is not None:
        unverified = ", ".join(plan.hardware.unverified) or "nothing"
        yield f"<li>Assumed of {escape(plan.hardware.name)}, not measured: {escape(unverified)}.</li>"
    yield "</ul>"
    if plan.hardware is not None and plan.hardware.sources:
        rows = [[key, source] for key, source in plan.hardware.sources.items()]
        shown = table(["number", "source"], rows, 9)
        yield f"<details><summary>Sources of hardware numbers</summary>{shown}</details>"
    if plan.answers:
        rows = [[f"{one.file}:{one.line}", one.value, count(one.count)] for one in plan.answers]
        title = f"{len(rows)} places that read a number of a tensor without values"
        yield f"<details><summary>{title}</summary>{table(['place', 'answer', 'times'], rows, 1)}</details>"


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


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>" if text else "–"


def _path(text: str) -> str:
    """Return the path of a module or of code, which may be broken where one of its parts ends."""
    whole = re.sub(r"(?<=[/.])", "<wbr>", escape(text))
    return f"<code>{whole}</code>" if text else "–"


def _lines(text: str) -> str:
    first, *others = text.split("\n")
    return escape(first) + (f"<pre>{escape(chr(10).join(others))}</pre>" if others else "")
