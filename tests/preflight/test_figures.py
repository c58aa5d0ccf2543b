"""Figures of a report: none that is above 0 is printed as 0."""

import pytest

from scalerl_jax.preflight.figures import amount, duration


@pytest.mark.parametrize(
    "value, expected",
    [(0, "0"), (0.00123, "0.00123"), (1.26, "1.26"), (71.04, "71"), (12345, "12,345")],
)
def test_an_amount_has_three_digits(value, expected):
    assert amount(value) == expected


@pytest.mark.parametrize(
    "seconds, expected",
    [
        (0.0, "0 us"),
        (8.5e-6, "8.5 us"),
        (0.0123, "12.3 ms"),
        (1.0, "1 s"),
        (3723.4, "3,723 s"),
    ],
)
def test_a_duration_has_three_digits_and_a_unit(seconds, expected):
    assert duration(seconds) == expected
