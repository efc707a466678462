"""A plan on the terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mindspeed_tune.launch_plan import KindPlan, LaunchPlan
from mindspeed_tune.quantities import count, duration, percent, size

_NAMED = 3


def print_summary(plan: LaunchPlan) -> None:
    """Print what a reader wants to know first."""
    from mindspeed_core.terminal.listing import say
    from mindspeed_megatron.tables import print_table

    for line in headline(plan):
        say(line)
    for title, headers, rows in _tables(plan):
        print()
        print_table(headers, rows, title=title)
    print()
    for line in _remarks(plan):
        say(line, hang=2)


def markdown(plan: LaunchPlan) -> str:
    """Return the plan as Markdown."""
    parts = ["# Plan of a launch", "", "```bash", " ".join(plan.command), "```", "", *headline(plan)]
    for title, headers, rows in _tables(plan):
        parts += ["", f"## {title[0].upper()}{title[1:]}", "", *_markdown_table(headers, rows)]
    parts += ["", "## Remarks", "", *(f"- {line}" for line in _remarks(plan))]
    return "\n".join(parts) + "\n"


def headline(plan: LaunchPlan) -> list[str]:
    """Return the first sentences: what was planned, and whether it works."""
    layout, step = plan.records[0].layout, plan.step
    lines = [
        f"{layout.world_size:,} ranks, {layout}, {plan.records[0].microbatches} micro-batches a step; "
        f"{len(plan.kinds)} kind{'s' if len(plan.kinds) > 1 else ''} of ranks."
    ]
    for problem in plan.problems:
        lines.append(f"PROBLEM: {problem}")
    if plan.ok:
        subject = "All kinds fit and the" if plan.hardware is not None else "The"
        lines.append(
            f"{subject} order of {plan.order.compared:,} calls agrees between {plan.order.pairs} pairs."
        )
    if step.seconds is not None and plan.hardware is not None:
        mfu = f", MFU {percent(step.mfu)}" if step.mfu is not None else ""
        lines.append(
            f"Estimated step on {plan.hardware.name}: {duration(step.seconds)}{mfu}, pipeline bubble "
            f"{percent(step.timeline.bubble)}, {count(round(step.tokens / step.seconds))} tokens/s."
        )
    else:
        lines.append(
            f"Pipeline bubble {percent(step.timeline.bubble)} by operations; --plan-hardware adds capacity, "
            "step time and MFU."
        )
    return lines


def _tables(plan: LaunchPlan) -> Iterator[tuple[str, Sequence[str], list[Sequence[object]]]]:
    categories = list(dict.fromkeys(c for kind in plan.kinds for c in kind.fullest.categories))
    headers = ["kind", "ranks", *categories, "exact", "allocator"]
    headers += ["beside it"] if _shows_outside(plan) else []
    headers += ["headroom"] if plan.hardware is not None else []
    yield (
        "memory of the fullest rank of each kind",
        headers,
        [_memory_row(kind, categories, plan) for kind in plan.kinds],
    )
    rows: list[Sequence[object]] = [
        (
            one.group.name,
            one.group.ranks.size,
            str(one.group.ranks),
            "yes" if one.crosses_nodes else "no",
            count(round(one.calls)),
            size(one.bytes),
        )
        for one in plan.groups
        if one.used
    ]
    yield (
        "groups that communicate, per rank and step",
        ("group", "size", "ranks", "crosses nodes", "calls", "input"),
        rows,
    )
    forms: list[Sequence[object]] = [
        (
            kind.kind.name,
            one.expected.group,
            one.expected.operation,
            count(one.expected.calls),
            size(one.expected.bytes),
            size(one.bytes),
            percent(one.difference),
        )
        for kind in plan.kinds
        for one in kind.forms
    ]
    if forms:
        headers = ["kind", "group", "operation", "calls", "closed form", "counted", "difference"]
        yield "closed forms of communication", headers, forms
    advice: list[Sequence[object]] = [
        (one.flags, one.feature or "megatron-core", size(one.saves), one.why)
        for one in plan.fullest.fullest.advice[:_NAMED]
    ]
    if advice:
        title = f"what would help {plan.fullest.kind.name}, estimated"
        yield title, ("flags", "feature", "saves", "why"), advice


def _memory_row(kind: KindPlan, categories: Sequence[str], plan: LaunchPlan) -> list[object]:
    memory = kind.fullest
    row: list[object] = [kind.kind.name, count(kind.kind.count)]
    row += [size(memory.categories.get(name, 0.0)) for name in categories]
    row += [size(memory.exact), size(memory.reserved)]
    row += [size(memory.outside)] if _shows_outside(plan) else []
    row += [size(memory.headroom)] if memory.headroom is not None else []
    return row


def _shows_outside(plan: LaunchPlan) -> bool:
    return any(kind.fullest.outside for kind in plan.kinds)


def _remarks(plan: LaunchPlan) -> Iterator[str]:
    peak = plan.fullest.fullest
    if peak.operator:
        where = f" ({peak.stack[0]})" if peak.stack else ""
        yield f"the peak of {plan.fullest.kind.name} is in {peak.phase}, during {peak.operator}{where}"
    for tensor in plan.fullest.fullest.largest[:_NAMED]:
        where = f" in {tensor.module}" if tensor.module else ""
        place = f" ({tensor.stack[0]})" if tensor.stack else ""
        yield f"large at the peak: {size(tensor.bytes)} of {tensor.category}{where}{place}"
    host = max(kind.record.host_bytes for kind in plan.kinds)
    if host:
        yield f"up to {size(host)} of tensors lie in the host's memory"
    backend = max((kind.record.backend for kind in plan.kinds), key=lambda one: one.bytes)
    if plan.hardware is None and backend.bytes:
        yield (
            f"beside tensors, the backend takes up to {size(backend.bytes)} during {backend.call}, as the "
            "platform that was planned declares"
        )
    if plan.hardware is None and backend.communicators:
        yield (
            f"beside tensors, communicators keep {size(backend.communicators)} of buffers, by the "
            "environment or the default of their backend"
        )
    if backend.rules:
        yield f"every call keeps the rules of {', '.join(backend.rules)}"
    if backend.made_late:
        yield (
            "communicators are made while a collective is under way, which all their ranks wait for in the "
            f"first step: {'; '.join(backend.made_late)}"
        )
    for rank, difference in plan.differing.items():
        sign = "more" if difference > 0 else "less"
        yield f"rank {rank} keeps {count(abs(difference))} bytes {sign} than its kind: an uneven division"
    for name, reason in plan.incomplete.items():
        yield f"incomplete: {name}: {reason}"
    if plan.order.unchecked:
        yield (
            f"not compared, since one member of each was run: {', '.join(plan.order.unchecked)}; "
            "--plan-ranks names further ranks"
        )
    if plan.hardware is not None and plan.hardware.unverified:
        yield f"assumed, not measured, of {plan.hardware.name}: {', '.join(plan.hardware.unverified)}"
    if plan.answers:
        total = sum(answer.count for answer in plan.answers)
        yield f"{count(total)} numbers were read from tensors without values, at {len(plan.answers)} places"
    yield (
        "not counted: fragmentation beyond the allocator's estimate, memory of data loaders, "
        "and what a communication library takes inside the device"
    )
    seconds = sum(record.cost.get("cpu_seconds", 0.0) for record in plan.records)
    most = max(record.cost.get("peak_bytes", 0.0) for record in plan.records)
    yield f"made of {len(plan.records)} ranks in {seconds:.1f} s of CPU time, at most {size(most)} each"


def _markdown_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    lines = ["| " + " | ".join(headers) + " |", "|" + "---|" * len(headers)]
    return lines + ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
