"""Environment variables of a training: who sets them, for which sizes, and that they go again."""

import os
from argparse import Namespace

import pytest

from mindspeed_megatron.environment import restore_attention_choice, set_device_connections

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


class Recorder:
    """The part of a session that the rules need."""

    def __init__(self):
        self.set, self.closing = {}, []

    def setenv(self, name, value):
        self.set[name] = value

    def at_close(self, action):
        self.closing.append(action)


def sizes(tp=1, cp=1, **flags):
    return Namespace(tensor_model_parallel_size=tp, context_parallel_size=cp, **flags)


@pytest.fixture
def session(monkeypatch):
    monkeypatch.delenv(CONNECTIONS, raising=False)
    return Recorder()


@pytest.mark.parametrize(
    ("tp", "cp", "expected"), [(1, 1, {}), (2, 1, {CONNECTIONS: "1"}), (1, 2, {CONNECTIONS: "1"})]
)
def test_one_queue_for_tensor_or_context_parallelism(session, tp, cp, expected):
    set_device_connections(session, sizes(tp, cp))
    assert session.set == expected


@pytest.mark.parametrize("flag", ["use_torch_fsdp2", "use_megatron_fsdp"])
def test_fully_sharded_parameters_are_gathered_beside_the_computation(session, flag):
    set_device_connections(session, sizes(2, 2, **{flag: True}))
    assert session.set == {}


def test_what_the_user_has_set_stays(session, monkeypatch):
    monkeypatch.setenv(CONNECTIONS, "8")
    set_device_connections(session, sizes(2))
    assert session.set == {}


def test_the_standalone_host_follows_the_rule_for_context_parallelism(session):
    import torch
    import torch.distributed as dist

    from mindspeed_core.platforms.cpu import CpuPlatform
    from mindspeed_train import parallel

    args = sizes(cp=2, use_torch_fsdp2=False, use_megatron_fsdp=False, local_rank=0)
    args.rank, args.world_size, args.distributed_timeout_minutes = 0, 1, 1
    try:
        info = parallel.init_distributed(session=session, args=args, platform=CpuPlatform())
    finally:
        dist.destroy_process_group()
    assert info.device == torch.device("cpu")
    assert session.set == {CONNECTIONS: "1"}


def test_the_choice_of_attention_is_forgotten_and_a_user_s_is_kept(session, monkeypatch):
    monkeypatch.setenv("NVTE_FLASH_ATTN", "1")
    monkeypatch.delenv("NVTE_FUSED_ATTN", raising=False)
    restore_attention_choice(session)
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    for action in session.closing:
        action()
    assert os.environ["NVTE_FLASH_ATTN"] == "1"
    assert "NVTE_FUSED_ATTN" not in os.environ
