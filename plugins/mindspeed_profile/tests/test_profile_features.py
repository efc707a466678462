"""The declaration, the refusals, and the traces of real trainings."""

import gzip
import json

import pytest
import torch
import torch.distributed as dist

from mindspeed_core.activation import prepare
from mindspeed_core.discovery.feature_checks import declared_features
from mindspeed_core.errors import UserError
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_megatron.instruments.communication_events import CommunicationEvents
from mindspeed_profile.features import DECLARATIONS, Profile
from mindspeed_profile.features.throughput import CountedThroughput
from mindspeed_profile.flop_meter import FlopMeter
from mindspeed_profile.recorder import StepRecorder
from mindspeed_testing.declared import declaration_faults
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.scenarios import scenario_parameters
from mindspeed_testing.training import train_side
from mindspeed_testing.verify import verify
from mindspeed_testing.worlds import WorldError

FEATURES = declared_features(DECLARATIONS)


def test_declarations_are_sound_light_and_on_their_pages():
    assert declaration_faults("mindspeed_profile.features") == []


def plan(*flags):
    registry = Registry.of(DECLARATIONS, "mindspeed-profile")
    return prepare(training_flags(flags, 1), platform="cpu", registry=registry, host="standalone").plan


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--profile-step-start", "5", "--profile-step-end", "5"], "must be above --profile-step-start 5"),
        (["--profile-step-start", "-1"], "counted from 0"),
        (["--profile-with-memory"], "--profile-with-memory needs --profile-with-cpu"),
        (["--profile-with-stack"], "--profile-with-stack needs --profile-with-cpu"),
        (["--profile-ranks", "-2"], "a rank is 0 or above"),
        (["--profile-aic-metrics", "L2Cache"], "at level0 the cores of a device collect no metrics"),
        (["--profile-analyse", "later"], "sync, async, off"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(flags, message):
    with pytest.raises(PlanError, match=message):
        plan("--profile", *flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--op-cal-tflops", "--peak-tflops", "0"], "--peak-tflops 0.0: a peak is above 0"),
        (["--npu-datadump", "a.json", "b.json"], "it takes one file at most"),
        (["--npu-datadump", "nowhere.json"], "--npu-datadump nowhere.json: No such file"),
    ],
)
def test_other_measurements_refuse_what_cannot_work(flags, message):
    with pytest.raises(PlanError, match=message):
        plan(*flags)


def test_operators_of_captured_graphs_are_not_counted():
    args = Bare(flops_mode="both", cuda_graph_impl="local", peak_tflops=None)
    assert "captured graphs (--cuda-graph-impl local)" in CountedThroughput.validate(args)[0]
    assert CountedThroughput.validate(Bare(**{**vars(args), "flops_mode": "model"})) == ()


def test_operators_of_compiled_regions_are_not_counted():
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.compile(torch.nn.ReLU()))
    with pytest.raises(UserError, match=r"1 is compiled.*add --flops-mode model"):
        FlopMeter(Bare(model=[model]), by_formula=True, counted=True)


@pytest.mark.parametrize(
    "flags", [("--profile-step-start", "3"), ("--flops-mode", "model"), ("--memory-snapshot-path", "here")]
)
def test_nothing_is_active_without_its_flag(flags):
    assert plan(*flags).names == ()


def test_a_session_without_the_flags_registers_nothing():
    registry = Registry.of(DECLARATIONS, "mindspeed-profile")
    wait = dist.Work.wait
    session = prepare(training_flags((), 1), platform="cpu", registry=registry, host="standalone")
    with session:
        for stage in ("train_step", "log_step", "get_batch", "forward_step", "build_model", "finish_run"):
            assert not {feature.name for feature in FEATURES} & set(session.implementations(stage))
        assert dist.Work.wait is wait
        assert CommunicationEvents not in session._state


def trace(path):
    with gzip.open(path) as file:
        return json.load(file)


def test_only_the_chosen_rank_writes_a_trace_of_exactly_the_chosen_steps(tmp_path):
    flags = ("--profile", *("--profile-step-start", "2"), *("--profile-step-end", "4"))
    level = ("--profile-level", "level1", "--profile-with-cpu")
    where = ("--profile-ranks", "1", "--profile-save-path", str(tmp_path))
    train_side((*flags, *level, *where), 2, 5)
    (path,) = tmp_path.iterdir()
    assert path.name == "rank00001_steps2-4.pt.trace.json.gz"
    content = trace(path)
    assert content["distributedInfo"]["rank"] == 1
    names = [event["name"] for event in content["traceEvents"] if event.get("cat") == "user_annotation"]
    assert names.count("step") == 2
    assert names.count("mb0.fwd") == names.count("optimizer_step") == names.count("finalize_gradients") == 2
    # Two of four micro-batches each, in two steps.
    assert names.count("forward-compute") == names.count("backward-compute") == 4
    assert {"all-grads-sync", "optimizer-inner-step"} <= set(names)
    assert any(name.startswith("wait DATA_PARALLEL_GROUP") for name in names)


def test_a_rank_outside_the_world_is_refused():
    with pytest.raises(WorldError, match=r"--profile-ranks '0 3': rank 3 is outside the world of 1"):
        train_side(("--profile", "--profile-ranks", "0", "3"), 1, 1)


class StoppedProfiler:
    def __init__(self):
        self.stops = 0

    def start(self):
        pass

    def step(self):
        pass

    def stop(self):
        self.stops += 1


class Platform:
    device_type = "cpu"


class Bare:
    """An object with the attributes it is given."""

    def __init__(self, **values):
        vars(self).update(values)


@pytest.fixture
def recording(monkeypatch):
    """A feature in the middle of its recorded steps, and its profiler."""
    profiler = StoppedProfiler()
    feature = Profile()
    options = Bare(start=0, end=9, level=0)
    feature._recorder = StepRecorder(options, lambda *asked: profiler)
    feature._recorder.before_step(0)
    return feature, profiler


def test_a_run_that_ends_within_the_steps_stops_the_profiler(recording):
    feature, profiler = recording
    ending = feature.finish_run()
    next(ending)
    assert profiler.stops == 1


def test_a_step_that_fails_stops_the_profiler(recording):
    feature, profiler = recording
    step = feature.train_step(session=Bare(platform=Platform()), run=Bare(iteration=1))
    next(step)
    with pytest.raises(RuntimeError, match="out of memory"):
        step.throw(RuntimeError("out of memory"))
    assert profiler.stops == 1


@pytest.mark.parametrize(
    ("feature", "scenario"),
    scenario_parameters(DECLARATIONS, platform="cpu", always=("profile-tp2-sp",), first=0),
)
def test_scenarios(feature, scenario):
    verdict = verify(feature, scenario, platform="cpu")
    assert verdict.passed, str(verdict)
