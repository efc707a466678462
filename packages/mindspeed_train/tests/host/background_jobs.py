"""Work for the process beside training in tests."""

import os
import time
from pathlib import Path

from mindspeed_testing.held_writer import pass_gate

PARTS = ("before its first byte", "while it works", "before it reports")


def repeat(job, shared, beat):
    return "x" * job["count"]


def fail(job, shared, beat):
    raise OSError("no space left")


def write_parts(job, shared, beat):
    with Path(job["path"]).open("wb") as file:
        for part in PARTS:
            pass_gate(part)
            file.write(b"1")
            beat()


def end_early(job, shared, beat):
    os._exit(3)


def take_long(job, shared, beat):
    end = time.monotonic() + job["seconds"]
    while time.monotonic() < end:
        beat()
    return "done"


def read(job, shared, beat):
    pass_gate(PARTS[0])
    return [list(shared[at : at + size]) for at, size in job["places"]]


def describe(job, shared, beat):
    import sys

    print("this is no outcome")
    return {"pid": os.getpid(), "nice": os.nice(0), "heavy": sorted({"torch", "megatron"} & set(sys.modules))}
