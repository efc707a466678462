"""``--finetune`` takes the weights of a checkpoint and nothing else, and says so."""

from types import SimpleNamespace

import pytest
import torch
from test_checkpoint_resume import close_run, open_run, save, train

from mindspeed_core.feature import hookimpl
from mindspeed_megatron.unwrap import unwrap
from mindspeed_testing import run_world
from mindspeed_train.monitoring.run_log import announce


class Counting:
    """A feature with state."""

    def __init__(self):
        self.steps, self.asked, self.restored = 0, 0, 0

    @hookimpl(wrapper=True)
    def train_step(self):
        self.steps += 1
        return (yield)

    @hookimpl
    def checkpoint_state(self):
        self.asked += 1
        return {"counting": {"steps": self.steps}}

    @hookimpl
    def restore_checkpoint_state(self, state):
        self.restored += 1
        self.steps = state["counting"]["steps"]


def weights(run):
    return {name: p.detach().clone() for name, p in unwrap(run.model[0]).named_parameters()}


def finetuned(folder):
    probe = Counting()
    run = open_run(["--save", folder], extra_plugins=(probe,))
    fresh = weights(run)
    train(run, 2)
    save(run)
    saved = weights(run)
    close_run(run)
    again, lines = Counting(), []
    run = open_run(["--load", folder, "--finetune", "--seed", "9"], extra_plugins=(again,))
    announce(run, SimpleNamespace(say=lines.append), 0.0)
    found = {
        "loaded": all(torch.equal(tensor, saved[name]) for name, tensor in weights(run).items()),
        "trained": any(not torch.equal(tensor, saved[name]) for name, tensor in fresh.items()),
        "place": (run.iteration, run.consumed_train_samples),
        "state": (again.steps, again.asked, again.restored),
        "line": lines[-1],
        "path": str(run.loaded.path),
    }
    close_run(run)
    resumed = Counting()
    run = open_run(["--load", folder], extra_plugins=(resumed,))
    announce(run, SimpleNamespace(say=lines.append), 0.0)
    found["resumed"] = (resumed.steps, resumed.restored, lines[-1])
    close_run(run)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_world(finetuned, 1, str(tmp_path_factory.mktemp("saved")))[0]


def test_the_weights_are_loaded_and_the_run_begins_at_step_zero(found):
    assert found["trained"]
    assert found["loaded"]
    assert found["place"] == (0, 0)


def test_the_state_of_features_is_neither_asked_for_nor_restored(found):
    assert found["state"] == (0, 0, 0)
    assert found["resumed"][:2] == (2, 1)


def test_the_start_says_what_was_loaded_from_where(found):
    assert found["path"].endswith("iter_0000002")
    assert f"training from step 0 with the weights of {found['path']} to step 8" in found["line"]
    assert f"training from step 2 of {found['path']} to step 8" in found["resumed"][2]
