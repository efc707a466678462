"""The extension points: schedules, and actions that schedules call by name.

A package contributes through its ``pyproject.toml``::

    [project.entry-points."mindspeed_pp.schedules"]
    acme = "acme_pp.eager:eager"

The name is a value of ``--pipeline-schedule``; actions are called by schedules under their names.
"""

from __future__ import annotations

from mindspeed_core.feature import ExtensionPoint

SCHEDULES = ExtensionPoint(
    name="pp.schedules",
    group="mindspeed_pp.schedules",
    summary="pipeline schedules: functions with the decorator mindspeed_pp.schedule",
    check="mindspeed_pp.rule:check_rule",
)

ACTIONS = ExtensionPoint(
    name="pp.actions",
    group="mindspeed_pp.actions",
    summary="actions of pipeline schedules: functions of one mindspeed_pp.named.NamedAction",
    check="mindspeed_pp.named:check_function",
)
