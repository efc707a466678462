"""Files of an earlier run are moved aside and never overwritten."""

from __future__ import annotations

from mindspeed_megatron.earlier_files import move_aside, next_number


def test_files_that_belong_together_get_one_number(tmp_path):
    for round_ in range(3):
        for name in ("plan.html", "plan.json"):
            (tmp_path / name).write_text(str(round_))
        moved = move_aside(tmp_path, ["plan.html", "plan.json", "plan.md"])
        assert [path.name for path in moved] == [f"plan.{round_ + 1}.html", f"plan.{round_ + 1}.json"]
    assert [(tmp_path / f"plan.{n}.json").read_text() for n in (1, 2, 3)] == ["0", "1", "2"]


def test_numbers_of_other_files_do_not_count(tmp_path):
    (tmp_path / "trace.7.gz").write_text("")
    assert next_number(tmp_path, ["plan.json"]) == 1
    assert next_number(tmp_path, ["plan.json", "trace.gz"]) == 8
    assert next_number(tmp_path / "nowhere", ["plan.json"]) == 1


def test_a_link_that_leads_nowhere_is_moved_too(tmp_path):
    (tmp_path / "plan.md").symlink_to(tmp_path / "gone")
    (moved,) = move_aside(tmp_path, ["plan.md"])
    assert moved.is_symlink()
