import pytest
from click.testing import CliRunner

from mindspeed_core.errors import UserError
from mindspeed_tune.command import program
from mindspeed_tune.launch_command import MODULE, SCRIPT, TRAIN, read_command


@pytest.mark.parametrize(
    ("text", "kind", "target", "arguments", "world"),
    [
        ("mindspeed-train --fake-world-size 64 --a 1", TRAIN, "", ("--a", "1"), 64),
        ("mindspeed-train --nproc 4 --max-restarts 2 --a", TRAIN, "", ("--a",), 4),
        ("--fake-world-size=8 --a", TRAIN, "", ("--a",), 8),
        ("torchrun --nnodes 4 --nproc-per-node 8 -m mindspeed_core.train --a", TRAIN, "", ("--a",), 32),
        ("torchrun --standalone --nproc_per_node=2 train.py --a", SCRIPT, "train.py", ("--a",), 2),
        ("torchrun --nnodes=1:16 --nproc-per-node 8 my.py", SCRIPT, "my.py", (), 128),
        ("python3 -m torch.distributed.run --nproc-per-node 2 my.py", SCRIPT, "my.py", (), 2),
        ("srun -N 4 -n 32 python -u my.py --b", SCRIPT, "my.py", ("--b",), 32),
        ("python -m package.train --b", MODULE, "package.train", ("--b",), 1),
        ("A=1 WORLD_SIZE=16 python my.py", SCRIPT, "my.py", (), 16),
    ],
)
def test_launchers_say_what_runs_and_how_often(text, kind, target, arguments, world):
    found = read_command(text.split(), {})
    assert (found.kind, found.target, found.arguments, found.world_size) == (kind, target, arguments, world)
    assert found.text == tuple(text.split())


def test_the_environment_of_a_launcher_counts():
    assert read_command(["mindspeed-train"], {"WORLD_SIZE": "12"}).world_size == 12
    assert read_command(["mindspeed-train"], {}).world_size == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no command to plan"),
        ("bash run.sh", "a shell script hides its command"),
        ("make train", "make: is no training command"),
        (
            "torchrun --nproc-per-node 8 my.py --fake-world-size 4",
            "--fake-world-size says 4 ranks and the laun",
        ),
        (
            "WORLD_SIZE=2 mindspeed-train --fake-world-size 4",
            "--fake-world-size says 4 ranks and the variable",
        ),
        ("mindspeed-train --fake-rank 3", "use --plan-ranks 3"),
        ("torchrun --nproc-per-node gpu my.py", "--nproc-per-node gpu: give a number"),
        ("mindspeed-train --fake-world-size", "--fake-world-size has no value"),
        ("torchrun --nproc-per-node 2", "starts nothing"),
    ],
)
def test_a_command_that_cannot_be_planned_is_one_sentence(text, message):
    with pytest.raises(UserError) as caught:
        read_command(text.split(), {})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_kernels_of_npus_without_torch_npu_are_one_sentence(monkeypatch):
    def nothing_installed():
        raise UserError("torch_npu is not installed here")

    monkeypatch.delenv("MINDSPEED_NPU_STUB_DEVICES", raising=False)
    monkeypatch.setattr("mindspeed_testing.npu.stubs.installed_version", nothing_installed)
    found = CliRunner().invoke(program, ["plan", "--plan-target", "npu", "--", "mindspeed-train"])
    assert found.exit_code == 1
    assert "--plan-target npu: torch_npu is not installed here" in found.output
