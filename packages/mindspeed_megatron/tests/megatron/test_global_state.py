"""State that megatron-core keeps for the process goes with the session that it served."""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from mindspeed_megatron.global_state import destroy_megatron_state

KEPT = [
    ("transformer.moe.token_dispatcher", "MoEAlltoAllTokenDispatcher", "cuda_dtoh_stream"),
    ("transformer.moe.shared_experts", "SharedExpertMLP", "stream"),
    ("pipeline_parallel.utils", "", "_COMP_STREAM"),
    ("pipeline_parallel.utils", "", "_COMM_STREAM"),
]
if find_spec("megatron.core.pipeline_parallel.fine_grained_activation_offload"):
    # Since 0.16, as is the buffer.
    KEPT += [
        ("pipeline_parallel.fine_grained_activation_offload", "PipelineOffloadManager", "OFFLOAD_MGR"),
        ("transformer.moe.fused_a2a", "", "_hybrid_ep_buffer"),
    ]


@pytest.mark.parametrize(("module", "kind", "name"), KEPT)
def test_streams_and_buffers_do_not_outlive_a_session(monkeypatch, module, kind, name):
    loaded = import_module(f"megatron.core.{module}")
    holder = getattr(loaded, kind) if kind else loaded
    monkeypatch.setattr(holder, name, object())
    destroy_megatron_state()
    assert getattr(holder, name) is None


def test_the_stream_of_transformer_engines_context_parallelism_goes_where_that_is_loaded(monkeypatch):
    attention = SimpleNamespace(cp_stream=object())
    loaded = SimpleNamespace(TEDotProductAttention=attention)
    monkeypatch.setitem(sys.modules, "megatron.core.extensions.transformer_engine", loaded)
    destroy_megatron_state()
    assert attention.cp_stream is None
