"""Defaults of stages in which a host itself has nothing to do; it lists this module last of its own."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from mindspeed_core.feature import hookimpl
from mindspeed_core.hooks.marker import DONE, Done


@hookimpl(trylast=True)
def validate_arguments_early(args: Namespace) -> Namespace:
    """Change nothing before validation."""
    return args


@hookimpl(trylast=True)
def process_group_options() -> dict[str, Any]:
    """Add no option."""
    return {}


@hookimpl(trylast=True)
def start_run() -> Done:
    """Prepare nothing."""
    return DONE


@hookimpl(trylast=True)
def finish_run() -> Done:
    """Close nothing."""
    return DONE


@hookimpl(trylast=True)
def before_save_checkpoint() -> Done:
    """Leave parameters and optimizer state: they are in canonical form already."""
    return DONE


@hookimpl(trylast=True)
def after_load_checkpoint() -> Done:
    """Leave parameters and optimizer state: training goes on with the canonical form."""
    return DONE
