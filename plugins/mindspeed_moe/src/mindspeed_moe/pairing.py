"""Conditions for running the passes of two micro-batches side by side; no torch."""

from __future__ import annotations


def without_pairs(stages: int) -> str:
    """Return the refusal of a pipeline of so many stages whose passes depend on one another."""
    return (
        f"--moe-fb-overlap with --pipeline-model-parallel-size {stages} and one model chunk per rank has no "
        "forward and backward pass to run side by side; use 1, virtual stages "
        "(--num-layers-per-virtual-pipeline-stage), or --schedules-method dualpipev of mindspeed-pp"
    )
