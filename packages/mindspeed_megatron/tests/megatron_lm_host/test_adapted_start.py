"""The ranks of a Megatron-LM script meet before the script starts torch.distributed."""

import fake_training as fake

from mindspeed_testing.ports import free_port
from mindspeed_testing.worlds import run_world


def start_alone():
    adaptor = fake.adapt(fake.Scaled)
    limit = ("--distributed-timeout-minutes", "0.02")
    found = fake.run_script("--platform", "cpu", *limit)
    adaptor.uninstall()
    return found


def train_together():
    adaptor = fake.adapt(fake.Scaled)
    found = fake.run_script("--platform", "cpu", "--distributed-backend", "gloo")
    adaptor.uninstall()
    return found


def test_a_rank_that_never_comes_to_a_script_is_named():
    # The launcher's store is there, the second rank is not.
    (found,) = run_world(start_alone, 1, env={"WORLD_SIZE": "2"})
    assert found["status"] == 1
    assert "error: rank 1 of 2 did not come within 1.2 s (--distributed-timeout-minutes)" in found["err"]
    assert "Traceback" not in found["err"]


def test_ranks_of_a_script_that_all_come_train():
    own = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(free_port())}
    first, second = run_world(train_together, 2, env=own, timeout=120)
    assert [first["status"], second["status"]] == [0, 0]
    assert [line for line in first["log"] if "lm loss" in line]


def train_marked():
    fake.adapt(fake.Marked)
    return fake.run_script("--platform", "cpu", "--marked-groups")


def test_groups_of_a_script_get_options_by_their_names():
    (found,) = run_world(train_marked, 1)
    asked = {name.removeprefix("asked for ") for line in found["log"] for name in line}
    assert {"dp", "tp", "pp", "ep", "marked"} <= asked, found["err"]
