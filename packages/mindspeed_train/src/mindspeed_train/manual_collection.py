"""Garbage collections at fixed steps, the same on all ranks: ``--manual-gc`` and its options.

A rank that collects while the others wait makes every step as long as a collection; with Python's collector
switched off, all collect after the same step.
"""

from __future__ import annotations

import gc
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_by_hand(args: Namespace) -> Iterator[None]:
    """Switch Python's collector off for a ``with`` block where ``--manual-gc`` is given."""
    if not args.manual_gc:
        yield
        return
    was_enabled = gc.isenabled()
    gc.disable()
    gc.collect()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def collect_after_step(args: Namespace, step: int) -> None:
    """Collect after every ``--manual-gc-interval``-th step; 0 collects around validations alone."""
    if args.manual_gc and args.manual_gc_interval and step % args.manual_gc_interval == 0:
        gc.collect()


@contextmanager
def collected_around_validation(args: Namespace) -> Iterator[None]:
    """Collect before and after a validation, unless ``--no-manual-gc-eval`` is given."""
    by_hand = args.manual_gc and args.manual_gc_eval
    if by_hand:
        gc.collect()
    yield
    if by_hand:
        # What a validation leaves is young.
        gc.collect(generation=0)
