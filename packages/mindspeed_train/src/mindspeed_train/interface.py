"""Names of this host that other distributions may import; everything else in it is private.

Proofs train with the host, tools hold its writer, and programs of plugins make checkpoints of its
checkpoints. A name is loaded when it is used: the writer runs in a process without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindspeed_train.arguments.run_length import batch_at
    from mindspeed_train.checkpoint import publish
    from mindspeed_train.checkpoint.common_state import NAME as COMMON_STATE
    from mindspeed_train.checkpoint.common_state import read_common
    from mindspeed_train.checkpoint.content import layout, layout_metadata, sharded_state
    from mindspeed_train.checkpoint.index import Index as CheckpointIndex
    from mindspeed_train.checkpoint.index import read_index
    from mindspeed_train.checkpoint.save import Saver
    from mindspeed_train.checkpoint.shard_reader import ShardReader
    from mindspeed_train.checkpoint.writer import write_job
    from mindspeed_train.data.python_helpers import index_builders
    from mindspeed_train.data.stages import MadeUpDataset
    from mindspeed_train.loop import setup, teardown
    from mindspeed_train.step import run_schedule
    from mindspeed_train.text.tokenizer import NullTokenizer

__all__ = [
    "COMMON_STATE",
    "CheckpointIndex",
    "MadeUpDataset",
    "NullTokenizer",
    "Saver",
    "ShardReader",
    "batch_at",
    "index_builders",
    "layout",
    "layout_metadata",
    "publish",
    "read_common",
    "read_index",
    "run_schedule",
    "setup",
    "sharded_state",
    "teardown",
    "write_job",
]

_HERE = "mindspeed_train."
_MODULES = {
    "COMMON_STATE": _HERE + "checkpoint.common_state:NAME",
    "CheckpointIndex": _HERE + "checkpoint.index:Index",
    "MadeUpDataset": _HERE + "data.stages",
    "NullTokenizer": _HERE + "text.tokenizer",
    "Saver": _HERE + "checkpoint.save",
    "ShardReader": _HERE + "checkpoint.shard_reader",
    "batch_at": _HERE + "arguments.run_length",
    "index_builders": _HERE + "data.python_helpers",
    "layout": _HERE + "checkpoint.content",
    "layout_metadata": _HERE + "checkpoint.content",
    "publish": _HERE + "checkpoint.publish:.",
    "read_common": _HERE + "checkpoint.common_state",
    "read_index": _HERE + "checkpoint.index",
    "run_schedule": _HERE + "step",
    "setup": _HERE + "loop",
    "sharded_state": _HERE + "checkpoint.content",
    "teardown": _HERE + "loop",
    "write_job": _HERE + "checkpoint.writer",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    path, _, within = _MODULES[name].partition(":")
    module = import_module(path)
    return module if within == "." else getattr(module, within or name)
