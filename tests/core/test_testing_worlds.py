import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mindspeed_testing import WorldError, run_world
from mindspeed_testing.worlds import WorldTimeout


def sum_of_ranks(start):
    dist.init_process_group("gloo")
    total = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(total)
    return total, os.environ["RANK"], os.environ["WORLD_SIZE"]


def surroundings():
    return os.getcwd(), sys.path, os.environ.get("MINDSPEED_TEST"), torch.get_num_threads(), os.getpid()


def preloaded():
    return "megatron.core.models.gpt" in sys.modules, sys.modules["__mp_main__"] is sys.modules["__main__"]


def rank_one_raises():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ValueError("the width is odd")
    dist.barrier()


def raises_with_a_note():
    error = ValueError("the width is odd")
    error.__notes__ = ["raised by the feature"]
    raise error


def rank_two_dies():
    dist.init_process_group("gloo")
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def rank_one_exits():
    if os.environ["RANK"] == "1":
        print("bye bye", flush=True)
        os._exit(3)


def waits_for_nobody(pids):
    Path(pids, os.environ["RANK"]).write_text(str(os.getpid()))
    if os.environ["RANK"] != "0":
        threading.Event().wait()


def unpicklable():
    return lambda: None


class Holder:
    @staticmethod
    def inside():
        return "inside"


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_meet_and_results_come_in_rank_order(size):
    results = run_world(sum_of_ranks, size, 10)
    total = 10 * size + size * (size - 1) // 2
    assert [(int(t), r, w) for t, r, w in results] == [(total, str(r), str(size)) for r in range(size)]


def test_children_have_the_parents_surroundings_and_one_thread(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINDSPEED_TEST", "from the parent")
    monkeypatch.syspath_prepend(str(tmp_path / "somewhere"))
    directory, path, variable, threads, pid = run_world(surroundings, 1)[0]
    assert (directory, path, variable, threads) == (str(tmp_path), sys.path, "from the parent", 1)
    assert pid != os.getpid()


def test_variables_of_one_world_win_and_stay_in_it(monkeypatch):
    monkeypatch.setenv("MINDSPEED_TEST", "parent")
    assert run_world(surroundings, 1, env={"MINDSPEED_TEST": "world"})[0][2] == "world"
    assert run_world(surroundings, 1)[0][2] == "parent"


def test_heavy_modules_are_preloaded_and_the_main_module_is_left_alone():
    assert run_world(preloaded, 1) == [(True, True)]


def test_functions_are_found_by_name():
    assert run_world("posixpath:basename", 1, "/a/b") == ["b"]
    assert run_world(Holder.inside, 1) == ["inside"]


def test_a_local_function_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="move it to module level"):
        run_world(lambda: 1, 1)


def test_a_name_without_module_is_refused():
    with pytest.raises(ValueError, match="module:qualname"):
        run_world("basename", 1)


def test_the_error_of_the_failing_rank_is_raised_not_its_consequences():
    with pytest.raises(WorldError, match=r"rank 1 of 4: ValueError: the width is odd") as caught:
        run_world(rank_one_raises, 4)
    assert caught.value.rank == 1
    assert not caught.value.failures[0].secondary
    assert "in rank_one_raises" in str(caught.value)


def test_notes_of_an_error_come_after_its_message():
    with pytest.raises(
        WorldError, match=r"rank 0 of 1: ValueError: the width is odd\n(.*\n)*raised by the feature"
    ):
        run_world(raises_with_a_note, 1)


def test_a_killed_rank_is_named_with_its_signal():
    with pytest.raises(WorldError, match=r"rank 2 of 4: killed by SIGKILL") as caught:
        run_world(rank_two_dies, 4)
    assert caught.value.rank == 2


def test_a_rank_that_exits_is_named_with_its_last_words():
    with pytest.raises(WorldError, match=r"rank 1 of 2: exited with status 3 without a result\nbye bye"):
        run_world(rank_one_exits, 2)


def test_hanging_ranks_are_named_with_the_place_and_leave_no_process(tmp_path):
    with pytest.raises(WorldTimeout, match=r"from rank\(s\) 1, 2 of 3") as caught:
        run_world(waits_for_nobody, 3, str(tmp_path), timeout=5)
    assert str(caught.value).count("in waits_for_nobody") == 2
    for file in tmp_path.iterdir():
        assert not Path("/proc", file.read_text()).exists()


def test_a_result_that_cannot_be_sent_is_an_error_of_its_rank():
    with pytest.raises(WorldError, match=r"rank 0 of 1: .*pickle"):
        run_world(unpicklable, 1)


def test_output_is_shown_on_request(capfd):
    with pytest.raises(WorldError):
        run_world(rank_one_exits, 2, show_output=True)
    assert "[rank 1] bye bye" in capfd.readouterr().out


def test_ranks_die_with_a_killed_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            from mindspeed_testing import run_world
            if __name__ == "__main__":
                run_world("test_testing_worlds:waits_for_nobody", 2, sys.argv[1])
            """
        )
    )
    pids = tmp_path / "pids"
    pids.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    parent = subprocess.Popen([sys.executable, str(script), str(pids)], env=environment)
    pause = threading.Event()
    for _ in range(3000):
        if len([file for file in pids.iterdir() if file.read_text()]) == 2 or parent.poll() is not None:
            break
        pause.wait(0.1)
    ranks = [int(file.read_text()) for file in pids.iterdir()]
    parent.kill()
    parent.wait()
    assert len(ranks) == 2
    for _ in range(100):
        if not any(_alive(pid) for pid in ranks):
            break
        pause.wait(0.1)
    assert not any(_alive(pid) for pid in ranks)


def _alive(pid):
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


kept = []


def start_a_manager():
    import multiprocessing

    kept.append(multiprocessing.get_context("spawn").Manager())
    return kept[0]._process.pid


def test_processes_that_a_rank_started_end_with_it():
    (pid,) = run_world(f"{__name__}:start_a_manager", 1)
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended, _, _ = select.select([process], [], [], 20.0)
    os.close(process)
    assert ended
