"""Closed formulas of features: what they are made of, and which one a platform has."""

import pytest

from mindspeed_core.discovery.feature_checks import check_feature
from mindspeed_core.errors import UserError
from mindspeed_core.feature import Feature, Flag
from mindspeed_megatron.formulas import evaluate, formula_of


class Counted(Feature):
    name = "counted"
    family = "tests"
    summary = "For tests."
    flags = (Flag("--counted"),)
    formulas = {"activation_bytes": "2 * hidden_size", "activation_bytes.npu": "3 * hidden_size"}


def test_a_formula_is_computed_from_arguments():
    values = {"seq_length": 8, "cut": 2, "whole": False, "level": "low", "element_size": 2}

    assert evaluate("seq_length * element_size / cut + (1 if whole else 3)", values) == 11
    assert evaluate("seq_length // 3 - 1 if level == 'low' else 0", values) == 1


@pytest.mark.parametrize("text", ["print()", "absent * 2", "values[0]", "'text'", "1 if a < 2 else 3"])
def test_what_is_no_formula_of_numbers_is_refused_and_never_run(text):
    with pytest.raises(UserError, match="formula"):
        evaluate(text, {})


def test_a_platform_may_have_its_own():
    assert formula_of(Counted, "activation_bytes", "npu") == "3 * hidden_size"
    assert formula_of(Counted, "activation_bytes", "cpu") == "2 * hidden_size"
    assert formula_of(Counted, "flop", "cpu") == ""


def test_a_declaration_with_a_formula_that_is_no_expression_is_refused():
    class Wrong(Counted):
        formulas = {"flop": "2 *"}

    assert any("'2 *' is no expression" in problem for problem in check_feature(Wrong))
