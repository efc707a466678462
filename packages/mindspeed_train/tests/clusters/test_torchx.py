"""The component of torchx, found, filled in and started by torchx itself."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser
from torchx.runner import get_runner
from torchx.specs import AppState, macros
from torchx.specs.builders import materialize_appdef
from torchx.specs.finder import get_component

FILE = (
    Path(__file__).resolve().parents[4]
    / "packages"
    / "mindspeed_train"
    / "src"
    / "mindspeed_train"
    / "launch"
    / "torchx_component.py"
)
FLAGS = ["--data-path", "my data/a*", "--run-dir", "$HOME/$$/${app_id}", "--lr", "1e-3", "--", "-j"]
TINY = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 64 "
    "--micro-batch-size 1 --global-batch-size 2 --mock-data --num-workers 0 --lr 1e-3 --train-iters 2 "
    "--eval-iters 0 --no-progress"
).split()


def role_of(*arguments: str):
    (role,) = materialize_appdef(get_component(f"{FILE}:train").fn, list(arguments)).roles
    return role


def launch_of(role):
    """The arguments of torchrun on the first node."""
    values = macros.Values(img_root="/", app_id="pretrain-x1", replica_id="0", rank0_env="RANK0_HOST")
    entrypoint, (option, command) = role.entrypoint, values.apply(role).args
    assert (entrypoint, option) == ("bash", "-c")
    program, *arguments = shlex.split(command)
    assert program == "torchrun"
    return get_args_parser().parse_args(arguments)


def test_torchx_accepts_the_component():
    assert get_component(f"{FILE}:train").validation_errors == []


def test_flags_reach_the_training_unchanged():
    launch = launch_of(role_of("-j", "2x8", "--platform", "npu", "--", *FLAGS))
    assert (launch.module, launch.training_script) == (True, "mindspeed_core.train")
    assert launch.training_script_args == ["--platform", "npu", *FLAGS]


def test_every_attempt_has_the_name_of_the_job_and_meets_at_the_first_node():
    role = role_of("-j", "2x8", "--rdzv_port", "29501", "--", *TINY)
    launch = launch_of(role)
    assert (launch.nnodes, launch.nproc_per_node, role.num_replicas) == ("2", "8", 2)
    assert launch.rdzv_id == "pretrain-x1"
    assert launch.rdzv_endpoint == "${RANK0_HOST:=localhost}:29501"
    assert role.env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "570"


@pytest.mark.parametrize(
    ("platform", "gpu", "devices"),
    [("cpu", 0, {}), ("cuda", 8, {}), ("npu", 0, {"huawei.com/Ascend910": 8})],
)
def test_a_node_has_one_device_per_worker(platform, gpu, devices):
    resource = role_of("-j", "2x8", "--platform", platform, "--", *TINY).resource
    assert (resource.gpu, resource.devices) == (gpu, devices)


def test_an_unknown_platform_is_refused():
    with pytest.raises(ValueError, match="--platform tpu: one of cpu, cuda, npu"):
        role_of("--platform", "tpu", "--", *TINY)


@pytest.fixture
def signals_kept():
    """Put back the handlers of signals that torchx's scheduler replaces for good."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals_kept")
def test_torchx_trains_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    own = ["--save", str(tmp_path / "save"), "--run-dir", str(tmp_path / "run")]
    with get_runner() as runner:
        handle = runner.run_component(
            f"{FILE}:train",
            ["-j", "1x1", "--", *TINY, *own],
            scheduler="local_cwd",
            cfg={"log_dir": str(tmp_path / "logs")},
        )
        status = runner.wait(handle, wait_interval=0.2)
    logs = "\n".join(path.read_text() for path in (tmp_path / "logs").rglob("std*.log"))
    assert status is not None
    assert status.state == AppState.SUCCEEDED, logs
    manifest = json.loads((tmp_path / "save/iter_0000002/manifest.json").read_text())
    assert manifest["job"].startswith("torchrun:pretrain-")
