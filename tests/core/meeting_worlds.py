"""Processes that meet, or fail to, as launchers start them; run in a process of its own by the tests.

torch is imported once and the processes are forked. All scenarios run at the same time, since most of them
wait for somebody who never comes. Prints, per scenario and process, what came of it.
"""

import json
import os
import signal
import socket
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from mindspeed_core.errors import UserError
from mindspeed_megatron.launch import meeting, store
from mindspeed_megatron.launch.meeting import meet_ranks
from mindspeed_testing.ports import free_port

SHORT, LONG = 4.0, 60.0
FLAG = "--distributed-timeout-minutes"
_MET = "met"


class AgentsStore:
    """A store served by a process of its own: what is forked here inherits no thread of c10d."""

    def __init__(self):
        (port, told), (waits, self.open) = os.pipe(), os.pipe()
        self.child = os.fork()
        if not self.child:
            os.close(self.open)
            served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(told, str(served.port).encode())
            os.read(waits, 1)
            os._exit(0)
        os.close(told)
        os.close(waits)
        self.port = int(os.read(port, 16))
        os.close(port)

    def close(self):
        os.kill(self.child, signal.SIGKILL)
        os.waitpid(self.child, 0)
        os.close(self.open)


class Scenario:
    """Processes of one world; each is ``(variables, what it does)``."""

    def __init__(self, folder, name):
        self.folder, self.name, self.port = folder, name, free_port()
        self.children, self.count = [], 0

    def start(self, rank, size, *, act=None, timeout=LONG, **variables):
        path = self.folder / f"{self.name}-{self.count}"
        self.count += 1
        child = os.fork()
        if child:
            self.children.append((child, path))
            return child
        answer = "died"
        try:
            os.dup2(os.open(path.with_suffix(".err"), os.O_WRONLY | os.O_CREAT, 0o600), 2)
            own = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port}
            for stale in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "LOCAL_RANK"):
                os.environ.pop(stale, None)
            os.environ.update({name: str(value) for name, value in {**own, **variables}.items()})
            answer = (act or come)(timeout)
        except UserError as error:
            answer = f"{type(error).__name__}: {error}"
        except BaseException as error:
            answer = f"unexpected {error!r}"
        finally:
            path.write_text(json.dumps(answer))
            os._exit(0)

    def results(self):
        answers, printed = [], ""
        for child, path in self.children:
            os.waitpid(child, 0)
            answers.append(json.loads(path.read_text()) if path.exists() else "killed")
            printed += path.with_suffix(".err").read_text()
        return {"answers": answers, "printed": printed}

    def wait_for(self, child):
        """Wait for the end of one process."""
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)


def come(timeout):
    found = meet_ranks(timedelta(seconds=timeout), flag=FLAG)
    return [_MET, found.rank, found.world_size]


def come_and_compute(timeout):
    """Meet twice in one process, the second time for a group that torch's own rendezvous starts."""
    for own_store in (True, False):
        found = meet_ranks(timedelta(seconds=timeout), flag=FLAG)
        given = {"store": found.store} if own_store else {}
        dist.init_process_group("gloo", rank=found.rank, world_size=found.world_size, **given)
        seen = [None] * found.world_size
        dist.all_gather_object(seen, found.rank)
        dist.barrier()
        dist.destroy_process_group()
    return [_MET, *seen]


def die_when_two_came(timeout):
    meeting._Judge._problem = lambda self: os._exit(9) if len(self.present) == 2 else ""
    return come(timeout)


def run_out_of_time_when_two_came(timeout):
    """End the wait of rank 0 when two have come, however slow they were."""
    rest = meeting._Judge.rest

    def end(self):
        if len(self.present) == 2:
            meeting._Judge.rest = rest
            self.deadline = 0.0
        return rest(self)

    meeting._Judge.rest = end
    return come(timeout)


def come_as_it_ends(timeout):
    """Find a store that has ended when the connection begins."""
    wait, looks = store._wait_for_listener, []

    def found_at_first(*given, **named):
        looks.append(given)
        if len(looks) > 1:
            wait(*given, **named)

    store._wait_for_listener = found_at_first
    store._HANDSHAKE_SECONDS = (timeout + 1.0, timeout + 1.0)
    return come(timeout)


def stay_after_meeting(timeout):
    answer = come(timeout)
    # Serves the store until the other process has been told.
    dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False).get("told")
    return answer


def tell_after(timeout):
    try:
        return come(timeout)
    finally:
        dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False).set("told", "")


def everything():
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        return run_all(Path(folder))


def run_all(folder):
    made = {}

    def scenario(name):
        return made.setdefault(name, Scenario(folder, name))

    for rank in range(3):
        scenario("all come").start(rank, 3, act=come_and_compute)
    scenario("one missing").start(0, 3, act=run_out_of_time_when_two_came)
    scenario("one missing").start(1, 3)
    scenario("no rank 0").start(1, 2, timeout=SHORT / 2)
    scenario("ended as it was found").start(1, 2, act=come_as_it_ends, timeout=SHORT / 2)
    scenario("other port").start(0, 2, timeout=SHORT / 2)
    scenario("other port").start(1, 2, timeout=SHORT / 2, MASTER_PORT=free_port())
    scenario("no such host").start(1, 2, timeout=SHORT / 2, MASTER_ADDR="nowhere.invalid")
    other = scenario("other world size")
    judged = [other.start(0, 2), other.start(1, 3)]
    for rank in (0, 1, 1):
        scenario("same rank").start(rank, 3)
    scenario("rank 0 dies").start(0, 3, act=die_when_two_came)
    scenario("rank 0 dies").start(1, 3)

    taken = socket.create_server(("127.0.0.1", scenario("no store").port))
    scenario("no store").start(1, 2, timeout=SHORT / 2)
    used = socket.create_server(("", scenario("port taken").port))
    scenario("port taken").start(0, 2)

    # Rank 0 ends when it has judged one: another one that comes first would be all that it names.
    for child in judged:
        other.wait_for(child)
    other.start(2, 3, timeout=SHORT / 2)

    late = scenario("late")
    late.start(0, 2, act=stay_after_meeting)
    late.wait_for(late.start(1, 2))
    late.start(1, 2, act=tell_after)

    foreign = scenario("another job")
    foreign.start(0, 2, act=stay_after_meeting, MINDSPEED_JOB_ID="one")
    foreign.wait_for(foreign.start(2, 3, MINDSPEED_JOB_ID="two"))
    foreign.start(1, 2, act=tell_after, MINDSPEED_JOB_ID="one")

    agents = AgentsStore()
    served = {"MASTER_PORT": agents.port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    again = scenario("agents' store")
    # An attempt of three ranks that never was complete leaves arrivals; then two worlds of other sizes.
    again.wait_for(again.start(2, 3, timeout=SHORT / 2, **served))
    for size in (2, 1):
        # The agent that replaces another has counted no restart.
        counts = [{"TORCHELASTIC_RESTART_COUNT": 1 - rank} for rank in range(size)]
        for child in [again.start(rank, size, **served, **counts[rank]) for rank in range(size)]:
            again.wait_for(child)
    # Two agents of one rank each that were both told to be the first.
    both = AgentsStore()
    for _ in range(2):
        scenario("two ranks 0").start(0, 2, MASTER_PORT=both.port, TORCHELASTIC_USE_AGENT_STORE="True")
    results = {name: one.results() for name, one in made.items()}
    for opened in (taken, used, agents, both):
        opened.close()
    return results


if __name__ == "__main__":
    json.dump(everything(), sys.stdout, indent=1)
