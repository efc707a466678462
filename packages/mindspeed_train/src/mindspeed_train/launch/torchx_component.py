"""``mindspeed-train`` as a component of torchx, which starts it on Slurm, Kubernetes or this machine.

Needs torchx (the extra ``torchx``); only torchx imports this module. It parses the annotations itself and
knows only those of ``typing``.
"""

from typing import Dict, Optional  # noqa: UP035

from torchx import specs
from torchx.components import dist

PLATFORMS = ("cpu", "cuda", "npu")
NPU = "huawei.com/Ascend910"
"""The name of an NPU in Kubernetes."""


def train(
    *flags: str,
    j: str = "1x1",
    platform: str = "cpu",
    image: str = "",
    name: str = "pretrain",
    h: Optional[str] = None,  # noqa: UP045
    cpu: int = 2,
    memMB: int = 8192,
    env: Optional[Dict[str, str]] = None,  # noqa: UP006, UP045
    max_retries: int = 0,
    rdzv_port: int = 29500,
    shutdown_timeout: int = 570,
) -> specs.AppDef:
    """Describe a training: torchrun on each node, and one worker per device.

    Args:
        flags: flags of mindspeed-train, unchanged; write ``--`` before the first
        j: nodes and workers of each, for instance 2x8
        platform: cpu, cuda or npu; a worker gets one device
        image: container image, where the scheduler uses one
        name: name of the job
        h: a named resource of torchx instead of cpu, memMB and devices
        cpu: CPU cores of a node
        memMB: memory of a node in MiB
        env: environment variables of the workers
        max_retries: how often the scheduler starts the job again
        rdzv_port: port of the first node where the workers meet
        shutdown_timeout: seconds that workers have for their last save when the job is told to end
    """
    if platform not in PLATFORMS:
        raise ValueError(f"--platform {platform}: one of {', '.join(PLATFORMS)}")
    _, _, workers, _ = dist.parse_nnodes(j)
    app = dist.ddp(
        # torchx replaces what a dollar sign introduces.
        *(flag.replace("$", "$$") for flag in ("--platform", platform, *flags)),
        m="mindspeed_core.train",
        j=j,
        image=image,
        name=name,
        h=h,
        cpu=cpu,
        gpu=workers if platform == "cuda" else 0,
        memMB=memMB,
        env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(shutdown_timeout), "OMP_NUM_THREADS": "1", **(env or {})},
        max_retries=max_retries,
        rdzv_port=rdzv_port,
    )
    (role,) = app.roles
    if platform == "npu" and h is None:
        role.resource.devices[NPU] = workers
    return app
