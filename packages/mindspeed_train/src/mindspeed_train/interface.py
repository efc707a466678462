"""Names of this host that other distributions may import; everything else in it is private.

Proofs train with the host, tools hold its writer, and plugins prepare data as it does and make checkpoints of
its checkpoints. A name is loaded when it is used: the writer runs in a process without torch.
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
    from mindspeed_train.data.files import check_dataset_files, token_dtype, write_index
    from mindspeed_train.data.python_helpers import index_builders
    from mindspeed_train.data.sources import data_sources
    from mindspeed_train.data.stages import MadeUpDataset, datasets_from_files
    from mindspeed_train.loop import setup, teardown
    from mindspeed_train.named_files import read_named_file
    from mindspeed_train.step import run_schedule
    from mindspeed_train.text.input import Segment, lines_of, open_parquet, segments_of
    from mindspeed_train.text.parts import (
        Part,
        file_facts,
        finish_parts,
        finished,
        locked,
        named_part,
        plan_parts,
    )
    from mindspeed_train.text.prepare import Progress, note_source, refuse_other_dataset
    from mindspeed_train.text.tokenizer import BpeTokenizer, NullTokenizer, tokenizer_of

__all__ = [
    "COMMON_STATE",
    "BpeTokenizer",
    "CheckpointIndex",
    "MadeUpDataset",
    "NullTokenizer",
    "Part",
    "Progress",
    "Saver",
    "Segment",
    "ShardReader",
    "batch_at",
    "check_dataset_files",
    "data_sources",
    "datasets_from_files",
    "file_facts",
    "finish_parts",
    "finished",
    "index_builders",
    "layout",
    "layout_metadata",
    "lines_of",
    "locked",
    "named_part",
    "note_source",
    "open_parquet",
    "plan_parts",
    "publish",
    "read_common",
    "read_index",
    "read_named_file",
    "refuse_other_dataset",
    "run_schedule",
    "segments_of",
    "setup",
    "sharded_state",
    "teardown",
    "token_dtype",
    "tokenizer_of",
    "write_index",
    "write_job",
]

_HERE = "mindspeed_train."
_MODULES = {
    "COMMON_STATE": _HERE + "checkpoint.common_state:NAME",
    "BpeTokenizer": _HERE + "text.tokenizer",
    "CheckpointIndex": _HERE + "checkpoint.index:Index",
    "MadeUpDataset": _HERE + "data.stages",
    "NullTokenizer": _HERE + "text.tokenizer",
    "Part": _HERE + "text.parts",
    "Progress": _HERE + "text.prepare",
    "Saver": _HERE + "checkpoint.save",
    "Segment": _HERE + "text.input",
    "ShardReader": _HERE + "checkpoint.shard_reader",
    "batch_at": _HERE + "arguments.run_length",
    "check_dataset_files": _HERE + "data.files",
    "data_sources": _HERE + "data.sources",
    "datasets_from_files": _HERE + "data.stages",
    "file_facts": _HERE + "text.parts",
    "finish_parts": _HERE + "text.parts",
    "finished": _HERE + "text.parts",
    "index_builders": _HERE + "data.python_helpers",
    "layout": _HERE + "checkpoint.content",
    "layout_metadata": _HERE + "checkpoint.content",
    "lines_of": _HERE + "text.input",
    "locked": _HERE + "text.parts",
    "named_part": _HERE + "text.parts",
    "note_source": _HERE + "text.prepare",
    "open_parquet": _HERE + "text.input",
    "plan_parts": _HERE + "text.parts",
    "publish": _HERE + "checkpoint.publish:.",
    "read_common": _HERE + "checkpoint.common_state",
    "read_index": _HERE + "checkpoint.index",
    "read_named_file": _HERE + "named_files",
    "refuse_other_dataset": _HERE + "text.prepare",
    "run_schedule": _HERE + "step",
    "segments_of": _HERE + "text.input",
    "setup": _HERE + "loop",
    "sharded_state": _HERE + "checkpoint.content",
    "teardown": _HERE + "loop",
    "token_dtype": _HERE + "data.files",
    "tokenizer_of": _HERE + "text.tokenizer",
    "write_index": _HERE + "data.files",
    "write_job": _HERE + "checkpoint.writer",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    path, _, within = _MODULES[name].partition(":")
    module = import_module(path)
    return module if within == "." else getattr(module, within or name)
