"""The journal of a search: what is in it is not made again, and what is not its own is refused."""

import json

import pytest

from mindspeed_core.errors import UserError
from mindspeed_tune.journal import NAME, SCHEMA, Journal

FACTS = {"command": ["mindspeed-train"], "ranks": 4}


def written(folder, *results, facts=FACTS):
    with Journal(folder, facts) as journal:
        for kind, key, value in results:
            journal.put(kind, key, value)


def test_a_result_is_there_when_the_journal_is_opened_again(tmp_path):
    written(tmp_path, ("plan", "tp 2", {"seconds": 1.5}), ("plan", "tp 4", {"seconds": 2.5}))
    with Journal(tmp_path, FACTS) as journal:
        assert journal.get("plan", "tp 2") == {"seconds": 1.5}
        assert journal.get("plan", "tp 8") is None
        assert journal.remembered == 2


def test_a_result_has_its_keys_in_the_same_order_again(tmp_path):
    written(tmp_path, ("cell", "tp 2", {"matrix": 1.5, "bytes": 2.5}))
    with Journal(tmp_path, FACTS) as journal:
        # Sums over them would otherwise differ in their last digit, and so would the report.
        assert list(journal.get("cell", "tp 2")) == ["matrix", "bytes"]


def test_a_line_that_was_being_written_is_made_again(tmp_path):
    written(tmp_path, ("plan", "tp 2", 1), ("plan", "tp 4", 2))
    path = tmp_path / NAME
    path.write_text(path.read_text()[:-9])
    with Journal(tmp_path, FACTS) as journal:
        assert journal.get("plan", "tp 2") == 1
        assert journal.get("plan", "tp 4") is None
        journal.put("plan", "tp 4", 3)
    with Journal(tmp_path, FACTS) as journal:
        assert journal.get("plan", "tp 4") == 3


def test_a_search_for_something_else_is_refused(tmp_path):
    written(tmp_path, ("plan", "tp 2", 1))
    with pytest.raises(UserError, match="is of another search: ranks differs"):
        Journal(tmp_path, {**FACTS, "ranks": 8}).__enter__()


def test_two_searches_on_one_folder_are_refused(tmp_path):
    with Journal(tmp_path, FACTS), pytest.raises(UserError, match="another search works in it"):
        Journal(tmp_path, FACTS).__enter__()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("not a journal\n", "is no journal of a search"),
        (json.dumps({"schema": SCHEMA + 1, "facts": FACTS}) + "\n", "written by another version"),
        (
            json.dumps({"schema": SCHEMA, "facts": FACTS}) + "\n{broken\n",
            "line 2 of journal.jsonl is damaged",
        ),
    ],
)
def test_a_file_that_is_no_journal_is_refused(tmp_path, text, says):
    (tmp_path / NAME).write_text(text)
    with pytest.raises(UserError, match=says):
        Journal(tmp_path, FACTS).__enter__()


def test_a_full_disk_keeps_what_is_there_and_says_so(tmp_path):
    with Journal(tmp_path, FACTS) as journal:
        journal.put("plan", "tp 2", 1)

        class Full:
            def write(self, text):
                raise OSError(28, "No space left on device")

            def close(self):
                pass

        file, journal._file = journal._file, Full()
        with pytest.raises(UserError, match="results so far are kept"):
            journal.put("plan", "tp 4", 2)
        file.close()
    with Journal(tmp_path, FACTS) as journal:
        assert journal.get("plan", "tp 2") == 1


def test_without_a_folder_results_are_kept_in_memory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Journal(None, FACTS) as journal:
        journal.put("plan", "tp 2", 1)
        assert dict(journal.all("plan")) == {"tp 2": 1}
    assert list(tmp_path.iterdir()) == []
