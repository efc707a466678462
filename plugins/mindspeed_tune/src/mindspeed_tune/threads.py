"""Threads that wait for other processes, and do not outlive an interruption."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def waiting_threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool; after an error or Ctrl-C what has not begun in it does not begin any more."""
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
