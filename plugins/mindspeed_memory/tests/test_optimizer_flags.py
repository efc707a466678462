"""Flags of the optimizer's features and of the allocator: refused, held back, and set with a way out."""

import os
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from mindspeed_core.activation import plan_for
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_memory import allocator_settings
from mindspeed_memory.features.memory_fragmentation import MemoryFragmentation
from mindspeed_testing.model_flags import training_flags

INSTALLED = Registry.discover()
BF16, HALF = ("--bf16",), ("--bf16", "--grad-reduce-in-bf16")
REUSE, RELEASE, SWAP = ("--reuse-fp32-param",), ("--release-fp32-grad",), ("--swap-optimizer",)
VIRTUAL, COMPRESS = ("--virtual-optimizer", "all"), ("--compress-optimizer",)
AWARE = ("--use-precision-aware-optimizer",)
EXPERTS = tuple("--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall".split())


def plan(*flags, host="standalone"):
    line = training_flags(flags, 1, INSTALLED) if host == "standalone" else flags
    return plan_for(line, platform="cpu", host=host, registry=INSTALLED)[0]


def problem(*flags):
    with pytest.raises(PlanError) as caught:
        plan(*flags)
    return str(caught.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (REUSE, ("--bf16", "upper half of a float32 number")),
        ((*REUSE, "--fp16"), ("--reuse-fp32-param", "--bf16")),
        ((*BF16, *REUSE, *SWAP), ("optimizer-master", "reuse-fp32-param", "swap-optimizer")),
        ((*BF16, *SWAP, *VIRTUAL), ("optimizer-state", "swap-optimizer", "virtual-optimizer")),
        ((*BF16, *COMPRESS, *VIRTUAL), ("optimizer-state", "compress-optimizer", "virtual-optimizer")),
        ((*BF16, *COMPRESS, *SWAP), ("optimizer-state", "compress-optimizer", "swap-optimizer")),
        ((*SWAP, "--swap-optimizer-times", "-1"), ("--swap-optimizer-times -1", "use 0 or more")),
        (("--virtual-optimizer", "1", "2"), ("2 budgets for 1 pipeline stages", "give one for all")),
        (("--virtual-optimizer", "much"), ("--virtual-optimizer much", "all or a number of GiB")),
        (("--virtual-optimizer", "0"), ("more than 0 GiB",)),
        (
            (*BF16, *REUSE, "--reuse-fp32-ties", "sign", "--reuse-fp32-rounding", "half-up"),
            ("has nothing to note", "drop it"),
        ),
        ((*SWAP, "--optimizer", "sgd"), ("--optimizer", "the update is AdamW's")),
        ((*SWAP, "--use-torch-fsdp2"), ("--use-torch-fsdp2", "parts of its own")),
        ((*SWAP, "--use-distributed-optimizer", "--use-megatron-fsdp"), ("--use-megatron-fsdp", "its own")),
        (
            (*SWAP, "--use-distributed-optimizer", *AWARE, "--exp-avg-dtype", "bf16"),
            ("--use-precision-aware-optimizer", "does not find it"),
        ),
        ((*SWAP, *EXPERTS, "--enable-expert-placement"), ("moe-expert-placement", "experts that move")),
    ],
)
def test_what_cannot_work_is_refused_with_flag_and_reason(flags, words):
    said = problem(*flags)
    assert all(word in said for word in words), said


def test_an_optimizer_aware_of_precisions_that_are_all_float32_stands_down():
    made = plan(*SWAP, *AWARE)
    assert "swap-optimizer" in made.names
    assert AWARE[0] in [note.flag for note in made.flag_notes]


@pytest.mark.parametrize("flags", [(), BF16, (*HALF, "--accumulate-allreduce-grads-in-fp32")])
def test_without_float32_copies_of_gradients_there_is_nothing_to_release(flags):
    (held,) = plan(*RELEASE, *flags).held_back
    assert held.name == "release-fp32-grad"
    assert "nothing to release" in held.reason


@pytest.mark.parametrize("flags", [HALF, ("--fp16",)])
def test_float32_copies_of_gradients_are_released(flags):
    assert {"release-fp32-grad", "block-optimizer"} <= set(plan(*RELEASE, *flags).names)


@pytest.mark.parametrize("host", ["standalone", "library", "megatron-lm"])
def test_every_host_takes_the_flags(host):
    made = plan(*BF16, *REUSE, *VIRTUAL, host=host)
    assert {"block-optimizer", "reuse-fp32-param", "virtual-optimizer"} <= set(made.names)


def test_the_optimizer_in_windows_is_there_when_something_needs_it():
    assert "block-optimizer" not in plan(*BF16).names


def test_rounding_that_changes_numbers_is_noted():
    notes = " ".join(map(str, plan(*BF16, *REUSE, "--reuse-fp32-rounding", "half-up").notes))
    assert "one weight in 2^17" in notes


def test_the_environment_asks_for_growing_segments_too(monkeypatch):
    monkeypatch.setenv("MEMORY_FRAGMENTATION", "1")
    assert "memory-fragmentation" in plan().names
    monkeypatch.setenv("MEMORY_FRAGMENTATION", "0")
    assert "memory-fragmentation" not in plan().names


def test_pools_are_refused_where_segments_are_to_grow(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert "which pools of their own do not go with" in problem("--memory-fragmentation-pools")


def test_pools_take_the_place_of_growing_segments():
    feature, session = MemoryFragmentation(), Opening("cuda")
    args = SimpleNamespace(memory_fragmentation_pools=True)
    for _ in feature.prepare_process(session, args):
        pass
    assert session.set == {}


def test_what_lasts_is_made_in_one_pool():
    """The stages that build, and the first update, allocate in the pool."""
    feature, entered = MemoryFragmentation(), []

    @contextmanager
    def pool():
        entered.append(stage)
        yield

    session = SimpleNamespace(platform=SimpleNamespace(memory_pool=lambda: pool))
    args = SimpleNamespace(memory_fragmentation_pools=True)
    for stage in ("build_model", "wrap_ddp", "build_optimizer", "update", "second update"):
        if "update" in stage:
            steps = feature.optimizer_step(session, SimpleNamespace(args=args))
        else:
            steps = getattr(feature, stage)(session, args)
        next(steps)
        with pytest.raises(StopIteration):
            steps.send("result")
    assert entered == ["build_model", "wrap_ddp", "build_optimizer", "update"]


class Opening:
    """A session that opens on a platform of some kind."""

    def __init__(self, *kinds):
        self.told, self.closing, self.set = [], [], {}
        self.platform = SimpleNamespace(kinds=lambda: frozenset(kinds), allocator_settings=self.told.append)
        self.setenv = self.set.__setitem__
        self.at_close = self.closing.append


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("kind", "variable"),
    [("cuda", "PYTORCH_CUDA_ALLOC_CONF"), ("npu", "PYTORCH_NPU_ALLOC_CONF")],
)
def test_the_variable_of_the_device_is_set(kind, variable):
    session = Opening(kind)
    allocator_settings.set_growing_segments(session)
    assert session.set == {variable: "expandable_segments:True"}
    assert session.told == []


def test_on_cpu_nothing_is_set():
    session = Opening("cpu")
    allocator_settings.set_growing_segments(session)
    assert session.set == {}


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_what_the_user_set_stands_and_is_noted(monkeypatch, variable):
    monkeypatch.setenv(variable, "max_split_size_mb:128")
    session = Opening("cuda")
    allocator_settings.set_growing_segments(session)
    assert session.set == {}
    notes = " ".join(map(str, plan("--memory-fragmentation").notes))
    assert f"{variable}=max_split_size_mb:128 stands as you set it" in notes


def test_a_device_in_use_is_told_directly_until_the_session_closes(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    session = Opening("cuda")
    allocator_settings.set_growing_segments(session)
    assert session.told == ["expandable_segments:True"]
    for action in session.closing:
        action()
    assert session.told[1:] == ["expandable_segments:False"]
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
