"""Nodes of a torchrun job that are lost and replaced, or fewer for a while: the job goes on where it was.

Each agent stands for a node, with an address of its own on the loopback interface.
"""

import os
import signal
import socket

import psutil
import pytest

from mindspeed_testing.faults import KillReport, read_steps, run_undisturbed, start_job
from mindspeed_testing.ports import free_port

FLAGS = (
    "--platform cpu --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 64 "
    "--micro-batch-size 1 --global-batch-size 2 --mock-data --num-workers 0 --lr 1e-3 --train-iters 20000 "
    "--eval-iters 0 --attention-dropout 0 --hidden-dropout 0 --no-progress"
).split()
# Heartbeats that a busy machine keeps; a node that is silent for longer is lost.
SILENCE = "keep_alive_interval=2,keep_alive_max_attempt=5,last_call_timeout=1,join_timeout=120,timeout=120"
# By default a new node waits for an address that the first node told once, before it came.
OWN_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
SECONDS = 240.0


class Nodes:
    """The agents of one job."""

    def __init__(self, folder, count):
        self.folder, self.count, self.agents = folder, count, []
        self.port = free_port()

    def start(self, *changed):
        if self.agents and self.count != "1":
            # The first node serves the rendezvous: on one machine each could.
            self.agents[0].wait_for(self.meets, seconds=SECONDS)
        number = len(self.agents) + 2
        own = (
            f"--nnodes {self.count} --nproc-per-node 1 --max-restarts 3 --monitor-interval 0.1 "
            f"--rdzv-backend c10d --rdzv-endpoint 127.0.0.2:{self.port} --rdzv-id test-{os.getpid()} "
            f"--rdzv-conf {SILENCE} --local-addr 127.0.0.{number} -m mindspeed_core.train"
        ).split()
        saves = ["--save-interval", "20", "--save", f"{self.folder}/save"]
        flags = [*own, *FLAGS, *saves, "--run-dir", f"{self.folder}/run", *changed]
        agent = start_job(
            flags,
            self.folder / f"node-{number}.txt",
            program="torch.distributed.run",
            environment=OWN_STORES,
        )
        self.agents.append(agent)
        return agent

    def meets(self):
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.2", self.port)) == 0

    def starts(self):
        return [step for agent in self.agents for step in agent.starts()]

    def trained(self, step):
        report = KillReport()
        for agent in self.agents:
            read_steps(agent.text(), report)
        return max(report.printed, default=0) >= step

    def report(self):
        report = KillReport()
        for agent in self.agents:
            read_steps(agent.text(), report)
        return report

    def close(self):
        for agent in self.agents:
            agent.close()


@pytest.fixture
def nodes(tmp_path):
    made = []

    def make(count):
        made.append(Nodes(tmp_path, count))
        return made[-1]

    yield make
    for one in made:
        one.close()


def lose(agent):
    """End a node as a power failure does: first the agent, which would otherwise restart its worker."""
    workers = agent.workers()
    agent.process.send_signal(signal.SIGKILL)
    for worker in workers:
        worker.kill()
    # Until they are gone, the port of the rendezvous is taken: on another machine it would be free.
    assert agent.process.wait(SECONDS) is not None
    assert psutil.wait_procs(workers, timeout=SECONDS)[1] == []


def test_an_agent_that_is_replaced_goes_on_from_the_checkpoint_of_its_job(nodes):
    job = nodes("1")
    lost = job.start()
    lost.wait_for(lambda: job.trained(25), seconds=SECONDS)
    lose(lost)
    replaced = job.start()
    # The new agent counts no restarts: the job is known by its --rdzv-id.
    replaced.wait_for(lambda: len(job.starts()) == 2 and job.trained(job.starts()[1] + 1), seconds=SECONDS)
    assert job.starts()[1] >= 20
    assert job.report().contradictions == []


@pytest.mark.thorough
def test_a_node_that_is_replaced_goes_on_bit_for_bit(nodes, tmp_path):
    job = nodes("2")
    first = job.start()
    lost = job.start()
    first.wait_for(lambda: job.trained(30), seconds=SECONDS)
    lose(lost)
    job.start()
    first.wait_for(lambda: len(job.starts()) == 2, seconds=SECONDS)
    resumed = job.starts()[1]
    first.wait_for(lambda: job.trained(resumed + 15), seconds=SECONDS)
    job.close()
    report = job.report()
    assert resumed >= 20
    assert resumed % 20 == 0
    assert report.contradictions == []
    undisturbed = run_undisturbed(FLAGS, tmp_path / "undisturbed", processes=2, steps=resumed + 15)
    assert {step: report.printed[step] for step in undisturbed} == undisturbed


@pytest.mark.thorough
def test_a_job_goes_on_with_fewer_nodes_and_with_more(nodes, tmp_path):
    job = nodes("1:2")
    first = job.start()
    lost = job.start()
    first.wait_for(lambda: job.trained(30), seconds=SECONDS)
    lose(lost)
    first.wait_for(lambda: len(job.starts()) == 2, seconds=SECONDS)
    smaller = job.starts()[1]
    first.wait_for(lambda: job.trained(smaller + 25), seconds=SECONDS)
    more = job.start()
    first.wait_for(lambda: len(job.starts()) == 3, seconds=SECONDS)
    larger = max(job.starts())
    first.wait_for(lambda: job.trained(larger + 15), seconds=SECONDS)
    printed = first.text() + more.text()
    job.close()
    assert "world 1 = " in printed
    assert printed.count("world 2 = ") == 2
    assert smaller % 20 == 0
    # A node that joins ends the workers with SIGTERM, on which they save.
    assert larger > smaller + 20
    # The batch of a step is the same, only its sums are made in another order.
    undisturbed = run_undisturbed(FLAGS, tmp_path / "undisturbed", processes=2, steps=larger + 15)
    for step, (loss, _) in job.report().printed.items():
        if step in undisturbed:
            assert float(loss) == pytest.approx(float(undisturbed[step][0]), rel=1e-3)


@pytest.mark.thorough
def test_a_size_that_the_layout_does_not_allow_is_refused_by_its_flags(nodes):
    job = nodes("1:2")
    first = job.start("--tensor-model-parallel-size", "2")
    lost = job.start("--tensor-model-parallel-size", "2")
    first.wait_for(lambda: job.trained(30), seconds=SECONDS)
    lose(lost)
    assert first.end(SECONDS) != 0
    assert "--tensor-model-parallel-size 2: tensor x pipeline x context" in first.text()
    assert "does not divide the world size 1" in first.text()
