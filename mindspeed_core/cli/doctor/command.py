"""``mindspeed-features doctor``: prints what `mindspeed_core.cli.doctor.checks` found."""

from __future__ import annotations

import click

from mindspeed_core.terminal.errors import EXIT_PROBLEMS
from mindspeed_core.terminal.foreign_text import emit
from mindspeed_core.terminal.training_flags import host_option
from mindspeed_core.terminal.wrapped import say


@click.command("doctor", short_help="Check versions, devices and common mistakes.")
@host_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(context: click.Context, host: str, as_json: bool) -> None:
    """Check this machine: versions, devices, limits, common mistakes, each with its remedy.

    Exit status 1 when something prevents training.
    """
    from mindspeed_core.cli.doctor.checks import ERROR, collect, examine
    from mindspeed_core.registry import Registry

    findings = examine(collect(Registry.discover(), host))
    failed = any(finding.severity == ERROR for finding in findings)
    if as_json:
        import json
        from dataclasses import asdict

        emit(json.dumps({"ok": not failed, "findings": [asdict(f) for f in findings]}, indent=2))
    else:
        width = max(len(finding.subject) for finding in findings)
        for finding in findings:
            say(f"{finding.severity:<8} {finding.subject:<{width}}  {finding.found}", hang=width + 11)
            if finding.remedy:
                emit(f"{'':<8} {'':<{width}}  -> {finding.remedy}")
        emit("something prevents training, see above" if failed else "ready to train")
    context.exit(EXIT_PROBLEMS if failed else 0)
