"""State that megatron-core keeps for the process goes with the session that it served."""

from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from mindspeed_core.megatron.global_state import destroy_megatron_state


def test_streams_of_experts_do_not_outlive_a_session(monkeypatch):
    monkeypatch.setattr(MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", object())
    monkeypatch.setattr(SharedExpertMLP, "stream", object())
    destroy_megatron_state()
    assert MoEAlltoAllTokenDispatcher.cuda_dtoh_stream is None
    assert SharedExpertMLP.stream is None
