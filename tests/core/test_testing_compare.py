import math

import pytest
import torch

from mindspeed_testing.compare import Comparison, compare_numbers, compare_tensors, relative_error, same_bits


def test_error_is_relative_to_the_largest_element():
    assert relative_error(torch.tensor([4.0, 0.1]), torch.tensor([4.0, 0.0])) == pytest.approx(0.025)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_never_passes_a_tolerance(bad):
    one = {"w": torch.tensor([1.0, bad])}
    assert not compare_tensors(one, one, tolerance=1.0).equal


def test_tolerance_decides():
    reference = {"w": torch.tensor([100.0])}
    close = {"w": torch.tensor([100.1])}
    assert compare_tensors(close, reference, tolerance=2e-3).equal
    assert not compare_tensors(close, reference, tolerance=5e-4).equal


def test_bit_equality_sees_the_last_bit_and_the_sign_of_zero():
    one = torch.tensor([1.0])
    assert not same_bits(one, torch.nextafter(one, torch.tensor([2.0])))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor([math.nan]), torch.tensor([math.nan]))


def test_bit_equality_demands_the_dtype():
    comparison = compare_tensors({"w": torch.ones(2)}, {"w": torch.ones(2).double()}, tolerance=0.0)
    assert "float32 against torch.float64" in str(comparison)


def test_a_tensor_on_one_side_only_is_a_difference():
    comparison = compare_tensors({"a": torch.ones(1)}, {"b": torch.ones(1)}, tolerance=1.0)
    assert [d.detail for d in comparison.failures()] == [
        "exists only on the side under test",
        "exists only on the reference",
    ]


def test_shapes_are_compared():
    comparison = compare_tensors({"w": torch.ones(2, 3)}, {"w": torch.ones(3, 2)}, tolerance=1.0)
    assert "(2, 3) against (3, 2)" in str(comparison)


def test_the_worst_tensor_comes_first():
    reference = {key: torch.ones(2) for key in "abc"}
    actual = {"a": torch.full((2,), 1.1), "b": torch.full((2,), 1.5), "c": torch.ones(2)}
    comparison = compare_tensors(actual, reference, tolerance=1e-3, quantity="gradients of step 2")
    assert [d.key for d in comparison.worst(3)] == ["b", "a", "c"]
    assert str(comparison).splitlines()[1] == "  gradients of step 2: b: relative error 0.5"


def test_series_of_different_length_differ():
    assert not compare_numbers([1.0], [1.0, 1.0], tolerance=1.0).equal


def test_comparing_nothing_is_not_agreement():
    assert not Comparison.of([compare_tensors({}, {}, tolerance=1.0)], 1.0).equal
