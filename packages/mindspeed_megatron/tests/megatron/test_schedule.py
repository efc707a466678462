"""The context of micro-batches, and what schedules are told of tensors between pipeline stages."""

from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mindspeed_core.errors import UserError
from mindspeed_core.run import BoundarySchema, RunContext, TensorSpec
from mindspeed_megatron.schedule import announced, begin_microbatch, boundary_options, scheduled

USUAL = BoundarySchema((TensorSpec("hidden_states", (8, 1, 4), None),))
WIDER = BoundarySchema((replace(USUAL.tensors[0], shape=(8, 1, 8)),))


class OneFeature:
    """A session in which ``wide`` implements the boundary stage."""

    def __init__(self, schema=WIDER, slots=()):
        self.schema, self.plan = schema, SimpleNamespace(names=("wide",), slots=dict.fromkeys(slots, "wide"))
        self.records = {}

    def state(self, record):
        return self.records.setdefault(record, record())

    def implementations(self, stage):
        return ["wide", "host test, boundary"]

    def call(self, stage, **arguments):
        return self.schema

    def default(self, stage, **arguments):
        return USUAL


def run_of(session, stages=2):
    pp = SimpleNamespace(size=lambda: stages)
    return SimpleNamespace(session=session, pg=SimpleNamespace(pp=pp), context=RunContext(), boundary=None)


def options(session, stages=2, virtual=None, told=False):
    return boundary_options(
        run_of(session, stages),
        Namespace(virtual_pipeline_model_parallel_size=virtual),
        SimpleNamespace(variable_seq_lengths=told),
    )


def test_micro_batches_are_counted_per_chunk_and_from_0_in_every_schedule():
    run = run_of(OneFeature())
    chunks = [SimpleNamespace(module=SimpleNamespace(vp_stage=index)) for index in (0, 1)]
    for _ in range(2):
        seen = []
        with scheduled(run, training=True):
            for chunk in (chunks[0], chunks[0], chunks[1]):
                begin_microbatch(run, chunk)
                seen.append((run.context.vp_stage, run.context.microbatch))
        assert seen == [(0, 0), (0, 1), (1, 0)]


def test_a_schedule_announces_passes_in_any_order_and_again_and_counting_goes_on_behind_them():
    run = run_of(OneFeature())
    chunk = SimpleNamespace(module=SimpleNamespace(vp_stage=1))
    seen = []
    with scheduled(run, training=True):
        for microbatch in (3, 0, 3):
            with announced(run, 1, microbatch):
                begin_microbatch(run, chunk)
            seen.append((run.context.vp_stage, run.context.microbatch))
        begin_microbatch(run, chunk)
        seen.append((run.context.vp_stage, run.context.microbatch))
    assert seen == [(1, 3), (1, 0), (1, 3), (1, 0)]


def test_the_context_ends_with_the_schedule_also_when_it_fails():
    run = run_of(OneFeature())

    def fail():
        with scheduled(run, training=False):
            begin_microbatch(run, SimpleNamespace())
            assert not run.context.training
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    assert run.context == RunContext()


def test_changed_tensors_are_announced_to_the_schedule():
    adjust = options(OneFeature())["adjust_tensor_shapes_fn"]
    assert adjust(None, None) == ([(8, 1, 8)], [(8, 1, 8)])


@pytest.mark.parametrize(("session", "stages"), [(OneFeature(USUAL), 2), (OneFeature(), 1)])
def test_nothing_is_announced_of_usual_tensors_or_without_a_pipeline(session, stages):
    assert options(session, stages) == {}


def test_changed_tensors_are_refused_under_interleaving():
    with pytest.raises(UserError, match=r"^wide: changes the tensors .* interleaved schedule cannot; build"):
        options(OneFeature(), virtual=2)


def test_a_schedule_of_a_feature_s_own_gets_them_all_the_same():
    assert "adjust_tensor_shapes_fn" in options(OneFeature(slots=("pipeline-schedule",)), virtual=2)


@pytest.mark.parametrize("virtual", [None, 2])
def test_the_default_runs_down_the_ranks_with_the_chunks(virtual):
    from mindspeed_megatron.chunk_places import place_chunks

    args = Namespace(virtual_pipeline_model_parallel_size=virtual)
    found = [place_chunks(args=args, pp_rank=rank, pp_size=2) for rank in range(2)]
    stages = [[place.global_stage for place in places] for places in found]
    assert stages == ([[0, 2], [1, 3]] if virtual else [[0], [1]])
    assert [place.pre_process for place in found[0]] == [True, *[False] * (len(found[0]) - 1)]
    assert [place.post_process for place in found[1]] == [*[False] * (len(found[1]) - 1), True]
    assert found[0][0].vp_stage == (None if virtual is None else 0)


def test_interleaved_stages_that_tell_each_other_shapes_may_change_them():
    assert options(OneFeature(), virtual=2, told=True) == {}
