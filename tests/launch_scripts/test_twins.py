"""Tiny twins of accepted scripts train like one process without features: a few, or all as thorough tests."""

from dataclasses import replace

import checked_lines
import pytest
import twin_rules
import twins
from verdicts import Record, sorted_flags

SEEN = (
    "mindspeed:system_tests_feature_precision_guarding_pretrain_fpg_llama",
    "mindspeed:system_tests_llama3_pretrain_llama3_8b_ptd",
)
"""Scripts whose twins the default suite trains."""
TWINS = twins.twins()


def script(source, name):
    return next(each for each in checked_lines.scripts(source) if each.name == name)


@pytest.mark.parametrize(
    "twin",
    [
        pytest.param(twin, id=names[0], marks=() if {*SEEN} & {*names} else pytest.mark.thorough)
        for twin, names in TWINS.items()
    ],
)
def test_a_twin_trains_like_one_process_without_features(twin):
    assert twins.train(twin).differences == []


def test_scripts_of_the_default_suite_are_accepted():
    assert {*SEEN} <= {name for names in TWINS.values() for name in names}


def test_no_kept_outcome_of_a_twin_is_bad():
    kept = Record.read(twins.RECORD).entries
    assert [entry["script"] for entry in kept.values() if entry["verdict"] != "ok"] == []


def test_a_twin_whose_flags_change_is_trained_again():
    one = next(iter(TWINS))
    assert replace(one, flags=(*one.flags, "--swiglu")).key != one.key
    assert replace(one, flags=tuple(reversed_options(one.flags))).key == one.key


def reversed_options(words):
    return [word for option in reversed(sorted_flags(words)) for word in option]


def test_made_up_conversations_are_what_scripts_of_finetuning_train_on():
    tuned = twin_rules.twin_of(script("mindspeed_llm", "qwen25_tune_qwen25_72b_4k_full_pack"))
    for flags in (tuned.flags, tuned.plain):
        assert flags[flags.index("--data-path") + 1].startswith("{files}/")
        assert "--neat-pack" in flags


def test_no_twin_needs_more_than_eight_processes():
    assert max(twin.world_size for twin in TWINS) <= twin_rules.AT_MOST


def test_a_twin_keeps_every_flag_but_files_and_length():
    given = script("mindspeed", "system_tests_llama2_pretrain_llama2_70B_32k_tp2_pp2_vpp1_cp2_ulysses_resume")
    options = {word for word in given.words if word.startswith("--")}
    kept = {word for word in twin_rules.twin_of(given).flags if word.startswith("--")}
    judged = {"--distributed-backend", "--use-mcore-models", "--optimizer-selection"}
    assert options - kept <= twin_rules.NOT_IN_TWINS | judged
    assert kept - options <= {"--global-batch-size"}


def test_sizes_shrink_together():
    given = script("mindspeed", "system_tests_feature_tests_tp2d")
    flags = twin_rules.twin_of(given).flags
    assert flags[flags.index("--tensor-model-parallel-size") + 1] == "4"
    assert flags[flags.index("--tp-x") + 1] == "2"


def test_the_reference_is_one_process_without_features():
    plain = twin_rules.twin_of(script("mindspeed", "system_tests_llama2_pretrain_llama_pp2_dp4"))
    assert plain.plain_world_size == 1
    assert not [word for word in plain.plain if "parallel" in word or "fused" in word or word == "--bf16"]
