"""The benchmark of personal parameters: its two claims, with few rounds and devices."""

import personal
import pytest


@pytest.mark.parametrize(("rule", "split"), [("local", "feature"), ("head", "label")])
def test_personal_parameters_are_better_than_the_average(rule, split):
    kept, averaged = (personal.accuracy(each, split, 0, 5, devices=4) for each in (rule, "average"))
    assert kept > averaged
