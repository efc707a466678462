"""Files that a run reads: one list for all splits, one per split, or a file with the list."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest

from mindspeed_core.errors import ArgumentError, DataError
from mindspeed_train.data.sources import data_sources, parse_blend, parse_split


def sources(**given):
    names = (
        "data_path",
        "data_args_path",
        "train_data_path",
        "valid_data_path",
        "test_data_path",
        "per_split_data_args_path",
    )
    return data_sources(Namespace(**{**dict.fromkeys(names), "mock_data": False, **given}))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a"], (["a"], None)),
        (["a", "b"], (["a", "b"], None)),
        (["2", "a"], (["a"], [2.0])),
        (["0.3", "a", "0.7", "b"], (["a", "b"], [0.3, 0.7])),
    ],
)
def test_data_path_is_prefixes_or_weighted_prefixes(words, expected):
    assert parse_blend(words).pair == expected


@pytest.mark.parametrize(
    "words", [[], ["0.3", "a", "b"], ["0.3", "a", "b", "c"], ["0", "a"], ["-1", "a", "1", "b"]]
)
def test_a_data_path_that_makes_no_sense_is_refused(words):
    with pytest.raises(ArgumentError, match="--data-path"):
        parse_blend(words)


@pytest.mark.parametrize("split", ["969,30,1", "969, 30, 1", "969/30/1"])
def test_split_accepts_the_usual_spellings(split):
    assert parse_split(split) == pytest.approx((0.969, 0.03, 0.001))


@pytest.mark.parametrize("split", ["", "0,0,0", "a,b", "1,2,3,4", "9,-1"])
def test_a_split_that_makes_no_sense_is_refused(split):
    with pytest.raises(ArgumentError, match="--split"):
        parse_split(split)


def test_one_list_serves_all_splits():
    found = sources(data_path=["1", "a", "2", "b"])
    assert [found.blend(split).prefixes for split in range(3)] == [("a", "b")] * 3


def test_each_split_can_have_its_own_list():
    found = sources(train_data_path=["1", "a", "3", "b"], valid_data_path=["c", "b"])
    assert found.blend(0).pair == (["a", "b"], [1.0, 3.0])
    assert found.blend(1).pair == (["c", "b"], None)
    assert found.blend(2) is None
    assert found.prefixes() == ("a", "b", "c")


def test_a_file_can_hold_the_list(tmp_path):
    (tmp_path / "list").write_text("30 a\n70 b\n")
    assert sources(data_args_path=str(tmp_path / "list")).blend(0).pair == (["a", "b"], [30.0, 70.0])


@pytest.mark.parametrize("train", ["1 a 2 b", ["1", "a", "2", "b"], [1, "a", 2, "b"]])
def test_a_file_can_hold_a_list_per_split(tmp_path, train):
    (tmp_path / "lists").write_text(json.dumps({"train": train, "valid": "c", "test": None}))
    found = sources(per_split_data_args_path=str(tmp_path / "lists"))
    assert [blend and blend.pair for blend in found.per_split] == [
        (["a", "b"], [1.0, 2.0]),
        (["c"], None),
        None,
    ]


@pytest.mark.parametrize("content", ["[", "[]", '{"train": 3}', '{"training": "a"}'])
def test_a_file_that_is_no_list_per_split_is_named(tmp_path, content):
    (tmp_path / "lists").write_text(content)
    with pytest.raises(DataError, match=r"--per-split-data-args-path .*lists"):
        sources(per_split_data_args_path=str(tmp_path / "lists"))


def test_a_missing_list_is_named(tmp_path):
    with pytest.raises(DataError, match=r"--data-args-path .*gone"):
        sources(data_args_path=str(tmp_path / "gone"))


@pytest.mark.parametrize(
    "given",
    [
        {"data_path": ["a"], "train_data_path": ["b"]},
        {"data_path": ["a"], "data_args_path": "b"},
        {"train_data_path": ["a"], "per_split_data_args_path": "b"},
        {"mock_data": True, "data_path": ["a"]},
        {"valid_data_path": ["a"]},
        {},
    ],
)
def test_data_that_is_named_twice_or_not_at_all_is_refused(given):
    with pytest.raises(ArgumentError):
        sources(**given)


def test_made_up_samples_need_no_file():
    assert sources(mock_data=True).made_up
