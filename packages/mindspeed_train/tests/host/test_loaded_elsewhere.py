"""A feature that loads a run from elsewhere: the folder that is saved into and the first lines know of it."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from test_checkpoint_resume import Messages, close_run, open_run, save

from mindspeed_core.feature import hookimpl
from mindspeed_core.run import LoadInfo
from mindspeed_megatron.model_state import count_as_loaded
from mindspeed_testing.worlds import run_world
from mindspeed_train.checkpoint.save_folder import FILE
from mindspeed_train.monitoring.run_log import announce


class FromElsewhere:
    """Takes the place of loading."""

    def __init__(self, iteration=0):
        self.iteration = iteration

    @hookimpl
    def load_checkpoint(self, run):
        count_as_loaded(run)
        return LoadInfo(path=None, iteration=self.iteration)


class OnTop:
    """Loads a base before the run's own checkpoint."""

    def __init__(self, base):
        self.base = base

    @hookimpl(wrapper=True)
    def load_checkpoint(self, session, run, source):
        if source is None:
            session.call("load_checkpoint", run=run, source=self.base)
        return (yield)


def started(flags, plugin=None):
    messages, lines = Messages(), []
    run = open_run(flags, extra_plugins=(plugin,) if plugin else ())
    announce(run, SimpleNamespace(say=lines.append), 0.0)
    close_run(run)
    return lines[-1], messages.end()


def everything(folder):
    run = open_run(["--save", f"{folder}/base"])
    save(run)
    close_run(run)
    target = ["--save", f"{folder}/target"]
    run = open_run(target, extra_plugins=(FromElsewhere(),))
    owned = os.path.exists(f"{folder}/target/{FILE}")
    close_run(run)
    empty = ["--load", f"{folder}/empty"]
    return {
        "owned": owned,
        "weights": started(target, FromElsewhere()),
        "step": started(target, FromElsewhere(7)),
        "on top": started(empty, OnTop(f"{folder}/base")),
        "nothing": started(empty),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return run_world(everything, 1, str(tmp_path_factory.mktemp("elsewhere")))[0]


def test_a_run_owns_its_folder_whoever_loads_it(runs):
    assert runs["owned"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("weights", "from step 0 with weights that a feature loaded"),
        ("step", "from step 7, which a feature loaded"),
        ("on top", "from step 0 with weights that a feature loaded"),
        ("nothing", "training from scratch"),
    ],
)
def test_the_first_line_says_where_weights_come_from(runs, case, words):
    assert words in runs[case][0]


def test_an_empty_folder_is_no_start_from_scratch_where_a_base_was_loaded(runs):
    assert [line for line in runs["on top"][1] if "scratch" in line] == []
    assert len([line for line in runs["nothing"][1] if "starting from scratch" in line]) == 1
