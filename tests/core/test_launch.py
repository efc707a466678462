"""Workers started here: who failed first, what is worth a restart, and what Slurm's variables mean."""

import json
import os
import re
import signal
import threading

import pytest

from mindspeed_core.errors import UserError
from mindspeed_megatron.launch import worker
from mindspeed_megatron.launch.environment import (
    Job,
    current_assignment,
    current_job,
    first_host,
    of_one_process,
    own_job,
    translate_slurm,
    within_one_machine,
)
from mindspeed_megatron.launch.hang import LONGEST_PULSE, Pulse, read_pulse
from mindspeed_train.launch import last_save, start
from mindspeed_train.launch.last_save import LastSave
from mindspeed_train.launch.supervisor import Supervisor


def starter(life):
    """Start workers that live as ``life(rank, restart)`` says: a status, or None to wait for a signal."""

    def begin(birth):
        pid = os.fork()
        if pid:
            return pid
        status = 99
        try:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                signal.signal(number, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            os.setpgid(0, 0)
            os.environ.update(birth.environment)
            for descriptor in birth.close:
                os.close(descriptor)
            answer = life(int(os.environ["RANK"]), int(os.environ["MINDSPEED_RESTART"]))
            if answer is None:
                signal.pause()
            status = answer
        finally:
            os._exit(status)

    return begin


def run(life, count=2, restarts=0):
    return Supervisor(starter(life), count, restarts).run()


def killed(rank, restart):
    if rank == 1 and restart < 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return None if restart < 2 else 0


def explained(rank, restart):
    if rank == 1:
        worker.send_message("explained", "error: --lr -1: must not be negative\n")
        return 1
    worker.send_message("consequence", "Connection closed by peer\n")
    return 1


def noticed_only(rank, restart):
    if rank == 1:
        worker.send_message("consequence", "Connection closed by peer\n")
    return 1 if rank == 1 else 3


def test_a_job_whose_workers_end_well_ends_well():
    assert run(lambda rank, restart: 0, count=3) == 0


def test_a_killed_worker_is_started_again_with_all_others(capfd):
    assert run(killed, restarts=2) == 0
    said = capfd.readouterr().err
    assert said.count("rank 1 of 2 was killed by SIGKILL") == 2
    assert "2 of --max-restarts 2" in said


def test_restarts_are_limited(capfd):
    assert run(killed, restarts=1) == 1
    assert "--max-restarts 1 are used up" in capfd.readouterr().err


def test_what_the_user_has_to_put_right_is_said_once_and_not_tried_again(capfd):
    assert run(explained, restarts=3) == 1
    assert capfd.readouterr().err == "rank 1 of 2:\nerror: --lr -1: must not be negative\n"


def test_an_exit_without_a_word_counts_more_than_a_consequence(capfd):
    assert run(noticed_only) == 1
    assert "rank 0 of 2 ended with status 3 without a message" in capfd.readouterr().err


def test_a_status_of_its_own_is_the_jobs_and_is_neither_explained_nor_tried_again(capfd):
    def chosen(rank, restart):
        worker.send_message("exit", "", status=5)
        return 5 if rank == 0 else 0

    assert run(chosen, restarts=2) == 5
    assert capfd.readouterr().err == ""


def beating(stopped, waits=True):
    """Live as a rank that waits for another one; the rank ``stopped`` stops at its first beat."""

    def life(rank, restart):
        if restart:
            return 0
        for beat in range(1, 1000):
            still = 0.01 * beat
            worker.send_pulse(Pulse(beat, still, waits, "here", step=7, limit=0.4, period=0.05))
            if rank == stopped and beat == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            threading.Event().wait(0.05)
        return 1

    return life


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("which", [0, -1], ids=["rank 0", "last rank"])
def test_a_stopped_worker_is_found_by_the_supervisor_whoever_it_is(capfd, which, count):
    rank = which % count
    assert run(beating(rank), count=count) == 1
    said = capfd.readouterr().err
    assert "error: no progress for 0 s (--hang-timeout-minutes) after step 7: " in said
    assert f"rank {rank} has not answered for" in said
    assert "(it is stopped by a signal)" in said


def test_a_worker_that_was_stopped_is_started_again_with_all_others(capfd):
    assert run(beating(0), restarts=1) == 0
    assert "rank 0 of 2 failed: no progress" in capfd.readouterr().err


def test_a_worker_that_never_says_a_word_is_silent(capfd):
    def life(rank, restart):
        return beating(None)(rank, restart) if rank else signal.pause()

    assert run(life) == 1
    assert "rank 0 has not answered for" in capfd.readouterr().err


def test_workers_that_are_done_hang_no_more():
    def life(rank, restart):
        worker.send_pulse(Pulse(1, 0.0, limit=0.2, period=0.05))
        worker.send_pulse(Pulse(2, 0.0, done=True))
        threading.Event().wait(0.5)
        return 0

    assert run(life) == 0


def test_a_pulse_of_any_length_fits_into_a_pipe_at_once(monkeypatch):
    reading, writing = os.pipe()
    monkeypatch.setenv("MINDSPEED_SUPERVISOR", f"0,0,{writing}")
    for length in (10, 5_000, 100_000):
        worker.send_pulse(Pulse(1, 2.0, place="p" * length, stack="\u00e9" * length, note="n" * length))
        line = os.read(reading, 100_000)
        assert len(line) <= LONGEST_PULSE
        assert read_pulse(line).still == 2.0
    os.close(reading)
    os.close(writing)


def test_workers_that_saved_after_ctrl_c_end_the_job_well_with_status_130(capfd):
    listening, heard = os.pipe()

    def interrupted(rank, restart):
        """Save after Ctrl-C, as the loop does, rank 0 a little later; it comes when both listen."""
        received = []
        signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
        if rank:
            os.read(listening, 1)
            os.kill(os.getppid(), signal.SIGINT)
        else:
            os.write(heard, b"0")
        while not received:
            threading.Event().wait(0.01)
        if not rank:
            threading.Event().wait(0.3)
        return 130

    assert run(interrupted) == 130
    assert capfd.readouterr().err == ""
    os.close(listening)
    os.close(heard)


def test_the_last_line_of_a_job_says_what_is_saved(tmp_path, capfd):
    last_save.write(tmp_path, LastSave(7, "ck/iter_0000007"))

    def words():
        return last_save.last_words(str(tmp_path))

    assert Supervisor(starter(killed), 2, 0, words).run() == 1
    said = capfd.readouterr().err.splitlines()[-1]
    assert said == f"last saved: step 7 in ck/iter_0000007; run folder: {tmp_path}"
    assert last_save.last_words(str(tmp_path / "nowhere")) == ""


def test_the_only_process_of_a_command_has_a_workers_variables_while_it_runs():
    env = {"MASTER_PORT": "29500"}
    with of_one_process(env):
        assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"]) == ("0", "1", "0")
    assert env == {"MASTER_PORT": "29500"}


def test_a_launchers_variables_are_left_alone():
    env = {"RANK": "3"}
    with of_one_process(env):
        assert env == {"RANK": "3"}


def test_a_supervisor_leaves_the_signal_handlers_as_they_were():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)]
    run(lambda rank, restart: 0)
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)] == before


def test_without_a_supervisor_a_worker_speaks_itself(monkeypatch):
    monkeypatch.delenv("MINDSPEED_SUPERVISOR", raising=False)
    assert not worker.supervised()
    assert not worker.send_message("explained", "text")


def test_a_worker_tells_its_supervisor_one_line(monkeypatch):
    reading, writing = os.pipe()
    monkeypatch.setenv("MINDSPEED_SUPERVISOR", f"{writing},0")
    assert worker.send_message("hang", "two\nlines", rank=3)
    line = os.read(reading, 1000)
    assert json.loads(line) == {"kind": "hang", "text": "two\nlines", "rank": 3}
    assert line.count(b"\n") == 1
    os.close(reading)
    os.close(writing)


STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
}


def test_srun_gives_rank_world_and_meeting_place():
    env = dict(STEP)
    assert translate_slurm(env)
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"]) == ("5", "8", "1")
    assert env["MASTER_ADDR"] == "gpu003"
    assert 15000 <= int(env["MASTER_PORT"]) < 30000


@pytest.mark.parametrize(
    "changed",
    [{"RANK": "0"}, {"SLURM_STEP_ID": None}, {"SLURM_NTASKS": "1"}, {"SLURM_PROCID": None}],
    ids=["torchrun inside", "batch script", "one task", "no task"],
)
def test_other_processes_under_slurm_are_left_alone(changed):
    env = {name: value for name, value in {**STEP, **changed}.items() if value is not None}
    before = dict(env)
    assert not translate_slurm(env)
    assert env == before


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[003-006,9],login1", "gpu003"), ("a,b", "a"), ("node7", "node7"), ("n[1,3]-ib", "n1-ib")],
)
def test_the_first_node_of_a_list(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("env", "job"),
    [
        ({}, Job()),
        ({"MINDSPEED_JOB_ID": "x", "MINDSPEED_RESTART": "2"}, Job("mindspeed:x", 2)),
        ({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"}, Job()),
        ({"TORCHELASTIC_RUN_ID": "r", "TORCHELASTIC_RESTART_COUNT": "1"}, Job("torchrun:r", 1)),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "3"}, Job("slurm:7", 3)),
        ({"MINDSPEED_JOB_ID": "x", "TORCHELASTIC_RESTART_COUNT": "1"}, Job("mindspeed:x", 1)),
        ({"TORCHELASTIC_RUN_ID": "r", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "3"}, Job("torchrun:r", 3)),
        ({"SLURM_JOB_ID": "7", "TORCHELASTIC_RESTART_COUNT": "1"}, Job("slurm:7", 1)),
    ],
)
def test_the_job_is_known_by_its_launcher(env, job):
    assert current_job(env) == job


def test_workers_keep_the_name_that_a_scheduler_gave_the_job(monkeypatch):
    monkeypatch.setenv("MINDSPEED_JOB_ID", "pod")
    monkeypatch.setenv("MINDSPEED_RESTART", "2")
    assert run(lambda rank, restart: 0 if (os.environ["MINDSPEED_JOB_ID"], restart) == ("pod", 2) else 1) == 0


def test_workers_of_an_unnamed_job_get_a_new_name(monkeypatch):
    monkeypatch.delenv("MINDSPEED_JOB_ID", raising=False)
    monkeypatch.setenv("MINDSPEED_RESTART", "2")
    assert own_job().name != own_job().name
    assert own_job().restart == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--nproc", "0"], "--nproc 0"),
        (["--nproc", "x"], "--nproc: invalid int value: 'x'; write one value"),
        (
            ["--run-dir", "-n"],
            "--run-dir '-n': expected one argument; write one value behind --run-dir, with =",
        ),
        (["--max-restarts", "2"], "add --nproc"),
        (["--nproc", "2", "--max-restarts", "-1"], "--max-restarts -1"),
    ],
)
def test_a_launch_that_cannot_work_is_refused(flags, words, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UserError) as caught:
        start.requested_launch(flags)
    assert words in str(caught.value)


def test_two_launchers_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="another launcher"):
        start.requested_launch(["--nproc", "2"])


WORLD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "gpu003", "MASTER_PORT": "29500"}


def test_a_launchers_variables_give_the_place_in_the_world():
    found = current_assignment(WORLD)
    assert (found.rank, found.world_size, found.address, found.port) == (1, 2, "gpu003", 29500)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"RANK": "2"}, "RANK 2 is not below WORLD_SIZE 2"),
        ({"RANK": "one"}, "RANK 'one' in the environment is no number"),
        ({"RANK": "-1"}, "RANK '-1'"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is not set"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT 70000 is no port"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
    ],
)
def test_variables_that_give_no_place_are_refused_by_name(changed, words):
    with pytest.raises(UserError, match=re.escape(words)):
        current_assignment({**WORLD, **changed})


@pytest.mark.parametrize(
    ("job", "continues"),
    [
        (Job("slurm:7", 0), False),
        (Job("slurm:7", 1), True),
        (Job("", 1), False),
        # A node that joins a job of torchrun has restarted nothing itself.
        (Job("torchrun:r", 0), True),
    ],
)
def test_an_attempt_that_may_find_checkpoints_of_its_own_job(job, continues):
    assert job.may_continue is continues


def test_workers_of_one_machine_stay_on_its_loopback_unless_told_otherwise():
    assert within_one_machine({}) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert within_one_machine({"GLOO_SOCKET_IFNAME": "eth0"}) == {}
