"""``tests/thorough.txt`` names tests that exist."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LISTED = [
    line
    for line in (ROOT / "tests" / "thorough.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]


def test_every_entry_is_a_file_or_a_test_of_its_file():
    for entry in LISTED:
        file, _, test = entry.partition("::")
        if not test:
            assert (ROOT / file).is_file(), entry
            continue
        function, _, case = test.partition("[")
        assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8"), entry
        assert not case or case.endswith("]"), entry


def test_no_entry_stands_twice():
    assert len(LISTED) == len(set(LISTED))
