"""Results of forked writers arrive whole, whatever their size, and leave nothing behind."""

from __future__ import annotations

import multiprocessing
import queue

import pytest

from mindspeed_core.hosts.standalone.checkpoint.results import FileResults


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return FileResults()


def test_a_large_result_of_a_forked_process_arrives(results):
    writer = multiprocessing.get_context("fork").Process(target=results.put, args=({0: "x" * 1_000_000},))
    writer.start()
    writer.join()
    assert not results.empty()
    assert len(results.get_nowait()[0]) == 1_000_000


def test_no_result_is_the_queues_own_exception(results):
    with pytest.raises(queue.Empty):
        results.get_nowait()


def test_nothing_is_left_when_the_results_are_taken(results, tmp_path):
    results.put(1)
    results.put(2)
    assert [results.get(), results.get()] == [1, 2]
    assert results.empty()
    assert list(tmp_path.iterdir()) == []


def test_results_of_a_failed_save_are_not_given_to_the_next(results, tmp_path):
    results.put("stale")
    results.renew()
    assert results.empty()
    assert len(list(tmp_path.iterdir())) == 1
