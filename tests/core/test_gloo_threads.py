"""A measurement of a world that computes waits until gloo has let go of its tensors."""

from __future__ import annotations

import torch.distributed as dist

from mindspeed_testing import gloo_threads


class _Done:
    def wait(self):
        return True


def test_a_wait_returns_when_gloos_threads_sleep_twice_in_a_row(monkeypatch):
    states = iter([False, True, False, True, True])
    monkeypatch.setattr(gloo_threads, "_all_asleep", lambda: next(states))

    assert gloo_threads._waiting(_Done.wait)(_Done()) is True

    assert list(states) == []


def test_waits_are_as_before_afterwards():
    before = dist.Work.wait

    with gloo_threads.released_when_waited():
        assert dist.Work.wait is not before

    assert dist.Work.wait is before


def test_a_running_thread_of_gloo_is_seen_and_others_are_not(monkeypatch, tmp_path):
    for thread, line in {
        "11": "11 (pt_gloo_runloop) R 1 2",
        "12": "12 (python (3)) R 1 2",
        "13": "13 (pt_gloo_runloop) S 1 2",
    }.items():
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "stat").write_text(line)
    monkeypatch.setattr(gloo_threads, "_THREADS", tmp_path)

    assert gloo_threads._state("11") == b"R"
    assert gloo_threads._state("12") == b"S"
    assert gloo_threads._state("gone") == b"S"
    assert not gloo_threads._all_asleep()


def test_a_thread_that_never_sleeps_holds_no_measurement_up(monkeypatch):
    monkeypatch.setattr(gloo_threads, "_all_asleep", lambda: False)
    monkeypatch.setattr(gloo_threads, "_MOST_SECONDS", 0.01)

    assert gloo_threads._waiting(_Done.wait)(_Done()) is True
