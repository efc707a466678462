"""Experts in Megatron-LM's scripts train the same on every layout, or are refused by name."""

import json

import fake_training as fake
import pytest

from mindspeed_core.feature import Feature, Flag, hookimpl
from mindspeed_kernels.features.weight_gradients import GroupedExperts
from mindspeed_megatron.layer_spec import SpecEditor
from mindspeed_moe.features import (
    AllToAllOverlap,
    CommunicationPlan,
    ExpertLayer,
    ForwardBackwardOverlap,
    LoadRecord,
    SequentialDispatcher,
    TensorRanksExtendExperts,
)
from mindspeed_testing.worlds import run_world

MODEL = (
    *("--platform", "cpu", "--use-cpu-initialization", "--num-experts", "4", "--moe-ffn-hidden-size", "32"),
    *("--disable-bias-linear", "--swiglu", "--calculate-per-token-loss"),
    *("--moe-aux-loss-coeff", "0.3", "--moe-z-loss-coeff", "0.1"),
)
WHOLE = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--expert-tensor-parallel-size", "1")


class Norms:
    """The gradient norm of each step."""

    def __init__(self):
        self.seen = []

    @hookimpl(wrapper=True)
    def optimizer_step(self):
        update = yield
        self.seen.append(update.grad_norm)
        return update


class OwnExperts(Feature):
    """Experts whose constructor marks nothing."""

    name, family, summary = "own-experts", "tests", "experts without marks"
    flags = (Flag("--own-experts", help="Use them."),)

    @hookimpl(wrapper=True)
    def build_layer_spec(self):
        from megatron.core.transformer.moe.experts import SequentialMLP

        class Unmarked(SequentialMLP):
            pass

        editor = SpecEditor((yield), owner="own-experts")
        editor.replace("experts", lambda site: site.carry(Unmarked))
        return editor.spec


def train(*layout):
    found = {}
    for name, flags in {"sequential": (), "grouped": ("--moe-grouped-gemm",)}.items():
        norms = Norms()
        fake.adapt(GroupedExperts, OwnExperts, extra=(norms,))
        log = fake.run_script(*MODEL, *layout, *flags)["log"]
        found[name] = [line["lm loss"] for line in log if "lm loss" in line], norms.seen
        fake.forget_run()
    if layout:
        fake.adapt(GroupedExperts, OwnExperts)
        try:
            found["own"] = fake.run_script(*MODEL, *layout, "--own-experts")["err"]
        except Exception as error:
            found["own"] = str(error)
    return found


@pytest.fixture(scope="module")
def trained():
    return run_world(train, 1)[0], run_world(train, 2, *WHOLE)


@pytest.mark.parametrize("kind", ["sequential", "grouped"])
def test_experts_that_tensor_parallel_ranks_share_learn_as_in_one_process(trained, kind):
    one, two = trained
    losses, norms = one[kind]
    assert len(norms) == 3
    for rank in two:
        assert rank[kind][0] == pytest.approx(losses, rel=1e-5)
        assert rank[kind][1] == pytest.approx(norms, rel=1e-4)


def test_experts_without_marks_are_refused_by_name(trained):
    for rank in trained[1]:
        assert "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight" in rank["own"]
        assert "placed by own-experts" in rank["own"]


SPREAD = (
    *("--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall", "--moe-grouped-gemm"),
    *("--moe-shared-expert-intermediate-size", "32"),
)


SPREAD_FEATURES = (GroupedExperts, ExpertLayer, AllToAllOverlap, ForwardBackwardOverlap, SequentialDispatcher)


def train_spread():
    found = []
    former = ("--moe-token-dispatcher-type", "alltoall_seq")
    for flags in ((), ("--moe-alltoall-overlap-comm",), ("--moe-fb-overlap",), former):
        norms = Norms()
        fake.adapt(*SPREAD_FEATURES, extra=(norms,))
        log = fake.run_script(*MODEL, *SPREAD, *flags)["log"]
        found.append(([line["lm loss"] for line in log if "lm loss" in line], norms.seen))
        fake.forget_run()
    return found


@pytest.fixture(scope="module")
def spread():
    return run_world(train_spread, 2)


def test_overlapped_experts_learn_as_without_the_overlap(spread):
    for plain, overlapped, _, _ in spread:
        assert len(plain[1]) == 3
        assert overlapped == plain


def test_passes_side_by_side_learn_as_one_after_the_other(spread):
    for plain, _, paired, _ in spread:
        assert paired == plain


def test_the_former_name_of_a_dispatcher_trains_as_its_successor(spread):
    for plain, _, _, former in spread:
        assert former == plain


TOGETHER = ("--tensor-model-parallel-size", "2", "--sequence-parallel")


def train_extended(folder):
    log = ("--moe-load-log", f"{folder}/loads.jsonl")
    layouts = {
        "sizes": (*SPREAD, *TOGETHER, "--expert-tensor-parallel-size", "1"),
        "extended": (*SPREAD[2:], *TOGETHER, "--moe-tp-extend-ep"),
        "planned": (*SPREAD[2:], *TOGETHER, "--moe-tp-extend-ep", "--moe-zerc", *log),
    }
    found = {}
    for name, flags in layouts.items():
        norms = Norms()
        features = GroupedExperts, ExpertLayer, TensorRanksExtendExperts, CommunicationPlan, LoadRecord
        fake.adapt(*features, extra=(norms,))
        lines = fake.run_script(*MODEL, *flags)["log"]
        found[name] = [line["lm loss"] for line in lines if "lm loss" in line], norms.seen
        fake.forget_run()
    return found


def test_extended_experts_are_those_of_the_two_sizes_with_and_without_a_plan(tmp_path):
    for rank in run_world(train_extended, 2, str(tmp_path)):
        assert len(rank["sizes"][1]) == 3
        assert rank["extended"] == rank["sizes"]
        for ours, plain in zip(rank["planned"], rank["sizes"], strict=True):
            assert ours == pytest.approx(plain, rel=1e-5)
    steps = (tmp_path / "loads.jsonl").read_text().splitlines()[1:]
    assert [json.loads(line)["step"] for line in steps] == [1, 2, 3]
