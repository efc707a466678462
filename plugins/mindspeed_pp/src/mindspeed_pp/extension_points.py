"""The extension point of schedules."""

from __future__ import annotations

from mindspeed_core.feature import ExtensionPoint

SCHEDULES = ExtensionPoint(
    name="pp.schedules",
    group="mindspeed_pp.schedules",
    summary="pipeline schedules: functions with the decorator mindspeed_pp.schedule",
    check="mindspeed_pp.rule:check_rule",
)
