"""A plan as one self-contained HTML page: pictures, tables, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from mindspeed_tune.charts import groups_chart, legend, memory_chart, timeline_chart
from mindspeed_tune.html_page import code, lines, page, path, table
from mindspeed_tune.launch_plan import LaunchPlan
from mindspeed_tune.quantities import count, duration, percent, size
from mindspeed_tune.record import LargeTensor


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
        items = "".join(f"<li>{lines(problem)}</li>" for problem in plan.problems)
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
            yield f'<div class="verdict no">{lines(one)}</div>'
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
                code(one.flags),
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
        places = "".join(f"<br>{path(line)}" for line in memory.stack[:4])
        yield (
            f"<p>Of {escape(kind.kind.name)}, in {escape(memory.phase)}, while {code(memory.operator)} "
            f"runs:{places}</p>"
        )
    rows = [
        [
            size(one.bytes),
            escape(one.category),
            path(one.module),
            "<br>".join(map(path, (one.operator, *one.stack[:3]))),
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
