"""Command lines that differ in nothing that a step sees share the outcomes of long checks."""

import pytest
from checked_lines import Script
from plans import Planned
from twin_rules import Twin
from verdicts import of_a_step

FLAGS = ("--num-layers", "4", "--hidden-size", "64", "--lr", "1e-3", "--bf16")


def planned(*flags):
    return Planned((Script("mindspeed", "made up", flags),), flags).key


def trained(*flags):
    return Twin(flags, FLAGS, 2).key


@pytest.mark.parametrize("key", [planned, trained])
@pytest.mark.parametrize(
    "flags",
    ["--lr 2e-3", "--log-throughput", "--ckpt-format torch", "--save PATH --save-interval=5", "--seed 1"],
)
def test_logs_files_rates_and_lengths_have_no_part_in_a_step(key, flags):
    assert key(*FLAGS, *flags.split()) == key(*FLAGS)


@pytest.mark.parametrize("key", [planned, trained])
@pytest.mark.parametrize(
    "flags",
    ["--num-layers 8", "--hidden-dropout 0.1", "--clip-grad 0", "--global-batch-size 8", "--new-flag"],
)
def test_everything_else_has_a_part(key, flags):
    assert key(*FLAGS, *flags.split()) != key(*FLAGS)


def test_numbers_that_a_step_computes_with_change_no_plan():
    assert planned(*FLAGS, "--weight-decay", "0.1") == planned(*FLAGS)
    assert trained(*FLAGS, "--weight-decay", "0.1") != trained(*FLAGS)


def test_the_order_of_options_does_not_matter():
    assert of_a_step(FLAGS) == of_a_step((*FLAGS[2:], *FLAGS[:2]))
