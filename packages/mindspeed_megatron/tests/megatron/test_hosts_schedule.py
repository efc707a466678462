"""The standalone host's schedule: what replaced ones get, and what the interleaved one is spared."""

from dataclasses import replace

import pytest

from mindspeed_core.feature import Feature, Flag, hookimpl
from mindspeed_testing.worlds import run_world
from mindspeed_train import loop as _standalone  # noqa: F401 - preloads what worlds need


class OwnSchedule(Feature):
    """A schedule that is chosen by the process groups."""

    name, family, summary = "own-schedule", "tests", "has a schedule of its own"
    flags = (Flag("--own-schedule"),)

    slots = ("pipeline-schedule",)

    @hookimpl
    def get_forward_backward(self, config, pg, run):
        return ("a schedule", pg.pp.size(), run.config is config)


class Wider(Feature):
    """Sends two times the width between pipeline stages."""

    name, family, summary = "wider", "tests", "sends two times the width"
    flags = (Flag("--wider"),)

    @hookimpl(wrapper=True)
    def boundary_schema(self):
        schema = yield
        tensors = [replace(spec, shape=(*spec.shape[:-1], 2 * spec.shape[-1])) for spec in schema.tensors]
        return replace(schema, tensors=tuple(tensors))


def set_up(*flags, step=False):
    from mindspeed_core.activation import activate
    from mindspeed_core.errors import UserError
    from mindspeed_core.platforms.cpu import CpuPlatform
    from mindspeed_core.registry import Registry
    from mindspeed_testing.model_flags import training_flags
    from mindspeed_train import HOST, loop

    flags = training_flags(flags, 2)
    registry = Registry.of((HOST, CpuPlatform, OwnSchedule, Wider))
    with activate(flags, host="standalone", platform="cpu", registry=registry) as session:
        run = loop.setup(session)
        if not step:
            return run.schedule
        with pytest.raises(UserError) as refused:
            session.call("train_step", run=run)
        return str(refused.value)


def without_training():
    return set_up("--skip-train", "--own-schedule")


def interleaved():
    layers = ("--num-layers", "4", "--num-layers-per-virtual-pipeline-stage", "1")
    return set_up("--wider", "--pipeline-model-parallel-size", "2", *layers, step=True)


def test_a_replaced_schedule_gets_the_groups_also_without_training():
    assert run_world(f"{__name__}:without_training", 1) == [("a schedule", 1, True)]


def test_changed_tensors_are_refused_under_interleaving_before_any_is_sent():
    for message in run_world(f"{__name__}:interleaved", 2):
        assert "megatron-core's interleaved schedule cannot" in message
