"""Flags of pipeline schedules, and what arguments say by them; declarations read it without a schedule."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

from mindspeed_core.feature import dest_of

BUILT_IN = (
    *("1f1b", "interleaved", "zb-h1", "zb-h2", "zbi", "zbv", "nanopipe", "dualpipev", "chimera"),
    *("fold-aiao", "fold-fifo", "list"),
)
"""Names of the schedules of `mindspeed_pp.schedules`."""
PERF_FLAG, LIST_FLAG, ORDERS_FLAG = "--automated-pipeline-perf", "--optimized-mbs-list", "--pp-schedule-list"
SWITCH_FLAG, OPTIMIZED_FLAG, MANUAL_FLAG = "--optimized-mbs-mode", "--optimized-pipeline", "--manual-mbs"
INDEX_FLAG = "--mbs-idx"
SHAPES_FLAG, COPIES_FLAG = "--pipeline-tensor-shapes", "--virtual-data-parallel-size"
FLAG, FILE_FLAG = "--pipeline-schedule", "--pipeline-schedule-file"
PROFILE_FLAG, PROFILE_STEPS_FLAG = "--profile-pipeline", "--profile-pipeline-steps"
TIMES_FROM_FLAG = "--pipeline-times-from"
TIMES_FLAG, WEIGHTS_FLAG, LIMIT_FLAG = "--pipeline-times", "--pipeline-w-placement", "--pipeline-memory-limit"
NATIVE_ORDER = (
    "--optimize-send-recv-comm",
    "--optimize-vpp-send-recv-comm",
    "--overlap-warmup-cooldown-communication",
)
"""Flags that ask for megatron-core's order with messages of each direction on a communicator of its own."""
SELECTING = (
    *NATIVE_ORDER,
    *(LIST_FLAG, MANUAL_FLAG, OPTIMIZED_FLAG, PERF_FLAG),
    *("--use-multiparameter-pipeline-model-parallel", "--pipeline-tensor-shapes"),
    *(PROFILE_FLAG, "--use-nanopipe-swap"),
)
"""Flags that need the engine, and let it run megatron-core's order where no schedule is named."""
AUTO, GREEDY, WAVES = "auto", "greedy", "waves"
IN_ADVANCE, IN_BUBBLE = "recompute_in_advance", "recompute_in_bubble"
"""Arguments of mindspeed-memory, which asks megatron-core's schedule for what `recomputed` does."""
PAIRED_FLAG = "--moe-fb-overlap"
"""Flag of mindspeed-moe, which hides the exchanges of one pass of a pair under the other one."""
_RECOMPUTING = ("pipeline_recompute", IN_ADVANCE, IN_BUBBLE)


def asked_for(args: Any) -> dict[str, str]:
    """Return the name of the schedule that each given flag stands for, by flag.

    A file stands for itself, under the name of the flag.
    """

    def given(dest: str) -> Any:
        return getattr(args, dest, None)

    found: dict[str, str] = {}
    if given("pipeline_schedule"):
        found[f"{FLAG} {given('pipeline_schedule')}"] = given("pipeline_schedule")
    if given("pipeline_schedule_file"):
        found[f"{FILE_FLAG} {given('pipeline_schedule_file')}"] = FILE_FLAG
    if given("use_nanopipe"):
        found["--use-nanopipe"] = "nanopipe"
    if given("schedules_method"):
        found[f"--schedules-method {given('schedules_method')}"] = given("schedules_method")
    if given("foldx_mode"):
        found[f"--foldx-mode {given('foldx_mode')}"] = f"fold-{given('foldx_mode')}"
    if given("pp_schedule_list"):
        found[ORDERS_FLAG] = ORDERS_FLAG
    native = [flag for flag in SELECTING if given(dest_of(flag))]
    if native and not found:
        interleaved = (said_chunks(args) or 1) > 1
        found[native[0]] = "interleaved" if interleaved else "1f1b"
    return found


def said_chunks(args: Any) -> int | None:
    """Return the chunks of each rank that flags say; None where none does."""
    derived = getattr(args, "virtual_pipeline_model_parallel_size", None)
    stages = getattr(args, "num_virtual_stages_per_pipeline_rank", None)
    per_chunk = getattr(args, "num_layers_per_virtual_pipeline_stage", None)
    ranks = getattr(args, "pipeline_model_parallel_size", 1) or 1
    layers = getattr(args, "num_layers", None)
    layout = getattr(args, "pipeline_model_parallel_layout", None)
    if derived or stages:
        return int(derived or stages or 1)
    rows = getattr(args, "pipeline_num_transformer_layers", None)
    if isinstance(rows, str):
        # Checked by whoever reads it; here only the columns of its first row count.
        first = re.match(r"\s*\[\s*\[([^\]]*)\]", rows)
        return len(first[1].split(",")) if first else None
    if isinstance(layout, str) and layout:
        return max(1, _stages_of_layout(layout) // ranks)
    if per_chunk and layers:
        return max(1, int(layers) // ranks // int(per_chunk))
    return None


def _stages_of_layout(layout: str) -> int:
    text = re.sub(r"\(([^)]+)\)\*(\d+)", lambda match: match[1] * int(match[2]), layout.replace(",", ""))
    return re.sub(r"(.)\*(\d+)", lambda match: match[1] * int(match[2]), text).count("|") + 1


def pairs_asked(args: Any) -> bool:
    """Return whether a feature runs the forward pass of a pair beside the backward pass."""
    return bool(getattr(args, dest_of(PAIRED_FLAG), False))


def recompute_flag(args: Any) -> str:
    """Return the flag that asks for forward passes again before their backward pass; empty without."""
    given = next((dest for dest in _RECOMPUTING if getattr(args, dest, False)), "")
    return "--" + given.replace("_", "-") if given else ""


def one_stage(args: Any) -> tuple[str, ...]:
    """Return the refusal of a schedule in a model of one pipeline stage; nothing for more stages."""
    ranks = getattr(args, "pipeline_model_parallel_size", 1) or 1
    if ranks > 1:
        return ()
    asked = next(iter(asked_for(args)), FLAG)
    return (f"{asked} with --pipeline-model-parallel-size {ranks}: use 2 or more, or drop it",)


def message_timeout(args: Any) -> timedelta:
    """Return how long a rank waits for a message of another one (``--distributed-timeout-minutes``)."""
    minutes = getattr(args, "distributed_timeout_minutes", None)
    return timedelta(minutes=10 if minutes is None else minutes)
