"""Environment variables of a worker, started by this package, torchrun or Slurm.

Torch-free. Slurm's own variables are translated into those of torch.distributed.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import uuid4

from mindspeed_core.errors import UserError
from mindspeed_core.platforms.machine import numbered_variable, unset_variable

SUPERVISOR = "MINDSPEED_SUPERVISOR"
"""``<report>,<life>,<pulse>``: the descriptors of a worker started by this package."""
STORE = "MINDSPEED_STORE_DESCRIPTOR"
"""The listening socket on which rank 0 serves the store."""
JOB = "MINDSPEED_JOB_ID"
"""The name of the job, the same for all its attempts; set by this package or by a scheduler."""
RESTART = "MINDSPEED_RESTART"
"""Number of times that the job named by ``MINDSPEED_JOB_ID`` was started again."""
_TORCHRUN = "torchrun:"
_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Job:
    """The job that this process works for.

    Attributes:
        name: the same for all attempts of one job; empty where nobody restarts it.
        restart: how often it was started again.
    """

    name: str = ""
    restart: int = 0

    @property
    def may_continue(self) -> bool:
        """Return whether an earlier attempt of this job may have published checkpoints.

        Under torchrun each agent counts for itself: one that replaces a lost node begins at zero, and nodes
        that join are not counted at all. There the job's name (``--rdzv-id``) alone tells.
        """
        return bool(self.name) and (self.restart > 0 or self.name.startswith(_TORCHRUN))


def current_job(environment: Mapping[str, str] | None = None) -> Job:
    """Return the job by the variables of this package, of torchrun or of Slurm, in this order.

    Launchers stand inside each other (torchrun in a pod, in a task of Slurm): the restarts of all of them
    count.
    """
    env = os.environ if environment is None else environment
    counts = (RESTART, "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    restart = sum(_count(env.get(name)) for name in counts)
    if env.get(JOB):
        return Job(f"mindspeed:{env[JOB]}", restart)
    run_id = env.get("TORCHELASTIC_RUN_ID", "none")
    if run_id != "none":
        return Job(f"{_TORCHRUN}{run_id}", restart)
    if env.get("SLURM_JOB_ID"):
        return Job(f"slurm:{env['SLURM_JOB_ID']}", restart)
    return Job()


def own_job(environment: Mapping[str, str] | None = None) -> Job:
    """Return the job of workers started by this process: the one named from outside, or else a new one.

    A scheduler that starts the program again names the job with ``MINDSPEED_JOB_ID`` and counts its restarts
    in ``MINDSPEED_RESTART``.
    """
    env = os.environ if environment is None else environment
    if env.get(JOB):
        return Job(env[JOB], _count(env.get(RESTART)))
    return Job(uuid4().hex)


@dataclass(frozen=True)
class Assignment:
    """The place of this process in the world that a launcher started.

    Attributes:
        rank: of ``world_size``.
        world_size: all ranks.
        address: name or number of the host where rank 0, or the launcher, serves the store.
        port: of the store.
    """

    rank: int
    world_size: int
    address: str
    port: int

    @property
    def meeting_place(self) -> str:
        """Return where the ranks meet, for messages."""
        return f"MASTER_ADDR {self.address}, MASTER_PORT {self.port}"


def current_assignment(environment: Mapping[str, str] | None = None) -> Assignment:
    """Return the place that the launcher's variables give this process.

    Raises:
        UserError: a variable is absent, is no number, or the rank is not in the world.
    """
    env = os.environ if environment is None else environment
    world_size = numbered_variable("WORLD_SIZE", None, env)
    rank = numbered_variable("RANK", None, env)
    if not 0 <= rank < world_size:
        raise UserError(
            f"RANK {rank} is not below WORLD_SIZE {world_size}; give each process a RANK from 0 to "
            f"{world_size - 1}, or start the job with torchrun, which does"
        )
    port = numbered_variable("MASTER_PORT", None, env)
    if not 0 < port < 1 << 16:
        raise UserError(f"MASTER_PORT {port} is no port; use one from 1 to 65535, the same for every process")
    if not env.get("MASTER_ADDR"):
        raise UserError(unset_variable("MASTER_ADDR"))
    return Assignment(rank, world_size, env["MASTER_ADDR"], port)


def translate_slurm(environment: MutableMapping[str, str]) -> bool:
    """Set torch.distributed's variables from those of ``srun``; nothing where ``RANK`` is set.

    In a batch script outside ``srun`` the same variables describe the allocation and no process has peers:
    only a job step counts.

    Returns:
        Whether variables were set.

    Raises:
        UserError: the step spans nodes, but their names are not known.
    """
    env = environment
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID"))
    if "RANK" in env or step is None or "SLURM_PROCID" not in env:
        return False
    world = _count(env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", "1")))
    if world <= 1:
        return False
    env["RANK"] = env["SLURM_PROCID"]
    env["WORLD_SIZE"] = str(world)
    env["LOCAL_RANK"] = env.get("SLURM_LOCALID", "0")
    if "MASTER_ADDR" not in env:
        nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", ""))
        if not nodes:
            raise UserError(
                "Slurm's variables name no nodes (SLURM_STEP_NODELIST is unset); set MASTER_ADDR to the node "
                "of the first task"
            )
        env["MASTER_ADDR"] = first_host(nodes)
    if "MASTER_PORT" not in env:
        # The same on every task without talking to each other, and different for jobs that share a node.
        env["MASTER_PORT"] = str(15000 + (_count(env.get("SLURM_JOB_ID")) * 8 + _count(step)) % 15000)
    return True


def within_one_machine(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that keep workers of one machine from listening where other machines reach them.

    gloo takes the interface that the machine's name stands for unless it is told another.
    """
    env = os.environ if environment is None else environment
    names = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    return {} if _INTERFACE in env or loopback is None else {_INTERFACE: loopback}


@contextmanager
def of_one_process(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Set the variables of the only worker where no launcher set any, and remove them at the end."""
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        # torch takes a free port.
        "MASTER_PORT": "0",
        **within_one_machine(environment),
    }
    if "RANK" in environment:
        yield
        return
    before = {name: environment.get(name) for name in alone}
    environment.update(alone)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value


def first_host(nodes: str) -> str:
    """Return the first name of a Slurm node list: ``gpu[003-006,9],login1`` gives ``gpu003``."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise UserError(f"SLURM_STEP_NODELIST {nodes!r}: no list of nodes; set MASTER_ADDR")
    return match[1] + (match[2] or "") + (match[3] or "")


def _count(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0
