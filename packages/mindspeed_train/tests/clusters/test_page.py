"""The commands of docs/clusters.md have options that the programs know, and name files that are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import slurm_standin
from torchx.specs.builders import materialize_appdef
from torchx.specs.finder import get_component

from mindspeed_train.launch.torchx_component import PLATFORMS

ROOT = Path(__file__).resolve().parents[4]
CLUSTERS = ROOT / "examples" / "clusters"
COMMANDS = [
    shlex.split(line)
    for block in re.findall(r"^```bash\n(.*?)^```$", (ROOT / "docs" / "clusters.md").read_text(), re.M | re.S)
    for line in block.replace("\\\n", " ").splitlines()
]


def test_the_commands_for_slurm():
    found = [command for command in COMMANDS if command[1:2] == ["sbatch"]]
    assert {command[0].removeprefix("PLATFORM=") for command in found} == set(PLATFORMS)
    for command in found:
        end = command.index("train.sbatch")
        slurm_standin.batch_parser().parse_args(command[2:end])
        assert (CLUSTERS / "slurm" / command[end]).is_file()


def test_the_commands_for_kubernetes():
    found = [command for command in COMMANDS if command[:2] in (["kubectl", "apply"], ["kubectl", "delete"])]
    files = {name for command in found for name in command if name.endswith(".yaml")}
    assert files == {"storage.yaml", "network.yaml", "cuda.yaml"}
    assert all((CLUSTERS / "kubernetes" / name).is_file() for name in files)


def test_the_commands_for_torchx():
    component = get_component(
        str(ROOT / "packages/mindspeed_train/src/mindspeed_train/launch/torchx_component.py:train")
    )
    found = [command for command in COMMANDS if command[:2] == ["torchx", "run"]]
    roles = []
    for command in found:
        arguments = command[command.index("$COMPONENT") + 1 :]
        roles += materialize_appdef(component.fn, arguments).roles
    assert [role.num_replicas for role in roles] == [1, 4, 4]
    assert [role.resource.gpu for role in roles] == [0, 8, 0]
