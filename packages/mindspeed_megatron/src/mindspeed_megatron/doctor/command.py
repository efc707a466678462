"""``mindspeed-features doctor``: prints what `mindspeed_megatron.doctor.checks` found."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from mindspeed_core.discovery.host import ERROR, NOTE, OK, WARNING
from mindspeed_core.terminal.errors import EXIT_PROBLEMS
from mindspeed_core.terminal.foreign_text import emit
from mindspeed_core.terminal.listing import (
    SEVERITIES,
    Cell,
    columns,
    print_heading,
    print_hint,
    print_labelled,
    print_rows,
    say,
)
from mindspeed_core.terminal.training_flags import host_option

if TYPE_CHECKING:
    from mindspeed_core.discovery.host import Finding

_WORST_FIRST = (ERROR, WARNING, NOTE)


@click.command("doctor", short_help="Check versions, devices and common mistakes.")
@host_option
@click.option("--all", "everything", is_flag=True, help="Every check, also those that passed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(context: click.Context, host: str, everything: bool, as_json: bool) -> None:
    """Check this machine: versions, devices, limits, common mistakes, each with its remedy.

    Exit status 1 when something prevents training.
    """
    from mindspeed_core.registry import Registry
    from mindspeed_megatron.doctor.checks import examine
    from mindspeed_megatron.doctor.facts import collect

    _begin("reading what is installed")
    findings = examine(collect(Registry.discover(), host, _begin))
    _begin("")
    failed = any(finding.severity == ERROR for finding in findings)
    if as_json:
        import json

        emit(json.dumps({"ok": not failed, "findings": [_as_json(f) for f in findings]}, indent=2))
    else:
        print_findings(findings, everything=everything)
    context.exit(EXIT_PROBLEMS if failed else 0)


def _begin(part: str) -> None:
    """Say on a terminal what is being done, in place of the part before; nothing more for an empty text."""
    if columns(sys.stderr) is not None:
        sys.stderr.write(f"\r\x1b[K{part} ..." if part else "\r\x1b[K")
        sys.stderr.flush()


def print_findings(findings: Sequence[Finding], *, everything: bool = False) -> None:
    """Print the verdict, what asks for attention with its remedy, and what is fine in short.

    Args:
        findings: of `mindspeed_megatron.doctor.checks.examine`.
        everything: print what is fine in full too.
    """
    counts = {severity: sum(f.severity == severity for f in findings) for severity in (*_WORST_FIRST, OK)}
    told = [f"{counts[s]} {s}{'' if counts[s] == 1 else 's'}" for s in _WORST_FIRST if counts[s]]
    verdict = "something prevents training" if counts[ERROR] else "ready to train"
    verdict_cell = Cell(verdict, "bad" if counts[ERROR] else "good")
    print_rows([(verdict_cell, ", ".join(told))], tabs=False)
    shown = (*_WORST_FIRST, OK) if everything else _WORST_FIRST
    for severity in shown:
        members = [finding for finding in findings if finding.severity == severity]
        if members:
            emit()
            print_heading(severity)
        wide = max((len(finding.subject) for finding in members), default=0)
        for finding in members:
            label = f"{finding.subject:<{wide}}"
            print_labelled(label, Cell(finding.observed), wide=wide, style=SEVERITIES[severity], indent=2)
            if finding.remedy:
                # A command to copy stays in one piece.
                emit(f"{'':<{wide + 4}}-> {finding.remedy}")
    passed = [finding for finding in findings if finding.severity == OK]
    if not everything and passed:
        emit()
        print_heading(OK)
        say(", ".join(_in_short(finding) for finding in passed), indent=2)
        emit()
        print_hint("mindspeed-features doctor --all prints every check.")


def _as_json(finding: Finding) -> dict[str, str]:
    """Return a finding for programs, which read what was observed as ``found``."""
    return {
        "severity": finding.severity,
        "subject": finding.subject,
        "found": finding.observed,
        "remedy": finding.remedy,
    }


def _in_short(finding: Finding) -> str:
    """Return subject and version of a check that passed, without its explanation."""
    observed = finding.observed.partition(" (")[0]
    return f"{finding.subject} {observed}" if len(observed) <= 20 else finding.subject
