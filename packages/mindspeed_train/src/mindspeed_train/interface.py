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
    from mindspeed_train.checkpoint.archive import StoredTensor, find_tensor, read_archive
    from mindspeed_train.checkpoint.collective import on_all_ranks, on_first_rank
    from mindspeed_train.checkpoint.common_state import NAME as COMMON_STATE
    from mindspeed_train.checkpoint.common_state import read_common
    from mindspeed_train.checkpoint.content import layout, layout_metadata, sharded_state
    from mindspeed_train.checkpoint.earlier_results import check_start
    from mindspeed_train.checkpoint.index import Chunk as TensorChunk
    from mindspeed_train.checkpoint.index import Index as CheckpointIndex
    from mindspeed_train.checkpoint.index import TensorEntry, read_index
    from mindspeed_train.checkpoint.model_arguments import MODEL_ARGUMENTS
    from mindspeed_train.checkpoint.opened_files import Part as FilePart
    from mindspeed_train.checkpoint.opened_files import open_inside
    from mindspeed_train.checkpoint.save import Saver
    from mindspeed_train.checkpoint.shard_reader import ShardReader
    from mindspeed_train.checkpoint.source import find as find_checkpoint
    from mindspeed_train.checkpoint.source import find_single as find_single_checkpoint
    from mindspeed_train.checkpoint.source import latest_step
    from mindspeed_train.checkpoint.tensor_archive import around as around_tensor
    from mindspeed_train.checkpoint.writer import write_job
    from mindspeed_train.data.datasets import MadeUpDataset
    from mindspeed_train.data.files import check_dataset_files, token_dtype, write_index
    from mindspeed_train.data.python_helpers import index_builders
    from mindspeed_train.data.sources import data_sources
    from mindspeed_train.data.stages import datasets_from_files
    from mindspeed_train.fault_tolerance.restart import own_checkpoint
    from mindspeed_train.launch.commands import parallel_command
    from mindspeed_train.loop import setup, teardown
    from mindspeed_train.named_files import read_named_file
    from mindspeed_train.program import main as run_train_program
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
    from mindspeed_train.text.prepare import note_source, refuse_other_dataset
    from mindspeed_train.text.progress import Progress
    from mindspeed_train.text.tokenizer import BpeTokenizer, NullTokenizer, tokenizer_of

__all__ = [
    "COMMON_STATE",
    "MODEL_ARGUMENTS",
    "BpeTokenizer",
    "CheckpointIndex",
    "FilePart",
    "MadeUpDataset",
    "NullTokenizer",
    "Part",
    "Progress",
    "Saver",
    "Segment",
    "ShardReader",
    "StoredTensor",
    "TensorChunk",
    "TensorEntry",
    "around_tensor",
    "batch_at",
    "check_dataset_files",
    "check_start",
    "data_sources",
    "datasets_from_files",
    "file_facts",
    "find_checkpoint",
    "find_single_checkpoint",
    "find_tensor",
    "finish_parts",
    "finished",
    "index_builders",
    "latest_step",
    "layout",
    "layout_metadata",
    "lines_of",
    "locked",
    "named_part",
    "note_source",
    "on_all_ranks",
    "on_first_rank",
    "open_inside",
    "open_parquet",
    "own_checkpoint",
    "parallel_command",
    "plan_parts",
    "publish",
    "read_archive",
    "read_common",
    "read_index",
    "read_named_file",
    "refuse_other_dataset",
    "run_schedule",
    "run_train_program",
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
    "MODEL_ARGUMENTS": _HERE + "checkpoint.model_arguments",
    "FilePart": _HERE + "checkpoint.opened_files:Part",
    "StoredTensor": _HERE + "checkpoint.archive",
    "TensorChunk": _HERE + "checkpoint.index:Chunk",
    "TensorEntry": _HERE + "checkpoint.index",
    "around_tensor": _HERE + "checkpoint.tensor_archive:around",
    "check_start": _HERE + "checkpoint.earlier_results",
    "find_checkpoint": _HERE + "checkpoint.source:find",
    "find_single_checkpoint": _HERE + "checkpoint.source:find_single",
    "find_tensor": _HERE + "checkpoint.archive",
    "latest_step": _HERE + "checkpoint.source",
    "on_all_ranks": _HERE + "checkpoint.collective",
    "on_first_rank": _HERE + "checkpoint.collective",
    "open_inside": _HERE + "checkpoint.opened_files",
    "own_checkpoint": _HERE + "fault_tolerance.restart",
    "read_archive": _HERE + "checkpoint.archive",
    "COMMON_STATE": _HERE + "checkpoint.common_state:NAME",
    "BpeTokenizer": _HERE + "text.tokenizer",
    "CheckpointIndex": _HERE + "checkpoint.index:Index",
    "MadeUpDataset": _HERE + "data.datasets",
    "NullTokenizer": _HERE + "text.tokenizer",
    "Part": _HERE + "text.parts",
    "Progress": _HERE + "text.progress",
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
    "parallel_command": _HERE + "launch.commands",
    "run_train_program": _HERE + "program:main",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    path, _, within = _MODULES[name].partition(":")
    module = import_module(path)
    return module if within == "." else getattr(module, within or name)
