"""Values of expressions, against hand-worked ones and Python's own arithmetic."""

from fractions import Fraction

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from scalerl_jax.environments.judges.values import evaluate, same_value


def same(one, other):
    values = evaluate(one), evaluate(other)
    assert None not in values, (one, other)
    return same_value(*values)


@pytest.mark.parametrize(
    "text, value",
    [
        (r"\frac12", Fraction(1, 2)),
        (r"\frac1{20}", Fraction(1, 20)),
        (r"-2\frac13", Fraction(-7, 3)),
        ("1 - 2 - 3", -4),
        ("8/4/2", 1),
        ("2^{3^2}", 512),
        ("-3^2", -9),
        ("(-3)^2", 9),
        ("2^-1", Fraction(1, 2)),
        ("3^10", 59049),
        ("(3!)!", 720),
        ("5!!", 15),
        ("6! !", 48),
        ("2 \\cdot 0!! - 1!!^2", 1),
        ("2^{3!!}", 8),
        (r"\binom{5}{2}", 10),
        (r"2|{-3}|", 6),
        (r"\lfloor -\frac12 \rfloor + \lceil -\frac12 \rceil", -1),
        (r"0.1\overline{6}", Fraction(1, 6)),
        (r".\overline{09}", Fraction(1, 11)),
        ("4.5e3", 4500),
        (r"1.5 \times 10^{-2}", Fraction(3, 200)),
        ("3:4", Fraction(3, 4)),
    ],
)
def test_rational_values_are_exact(text, value):
    assert evaluate(text).points == (value,)


@given(st.integers(0, 2000))
def test_double_factorials_are_sympy_s(n):
    assert evaluate(f"{n}!!").points == (Fraction(int(sympy.factorial2(n))),)


@pytest.mark.parametrize("text", ["3!!!", "10001!!", "(5!!)!!!", "(-2)!!"])
def test_what_is_no_double_factorial_or_too_large_has_no_value(text):
    assert evaluate(text) is None


def test_an_identity_of_whole_numbers_alone_is_not_decided():
    assert same("n!!", "n \\cdot (n-2)!!") is True
    assert same("(2n)!!", "2^n n!") is None
    assert same("x + 5!!", "x + 16") is False


def written(value):
    return f"({value.numerator})/({value.denominator})"


def fractions():
    return st.fractions(min_value=-50, max_value=50, max_denominator=40)


@st.composite
def expressions(draw, depth=3):
    """A text and the value that Python gives to it."""
    if depth == 0 or draw(st.booleans()):
        value = draw(fractions())
        return rf"\frac{{{value.numerator}}}{{{value.denominator}}}", value
    (one, a), (other, b) = (draw(expressions(depth=depth - 1)) for _ in range(2))
    shape = draw(st.sampled_from("+-*/^"))
    if shape == "^":
        power = draw(st.integers(0, 4))
        return rf"\left({one}\right)^{{{power}}}".replace(r"\left", "").replace(
            r"\right", ""
        ), a**power
    if shape == "/" and b == 0:
        shape = "*"
    sign = {"*": r"\cdot"}.get(shape, shape)
    values = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else 0}
    return f"(({one}) {sign} ({other}))", values[shape]


@given(expressions())
def test_arithmetic_is_python_s(expression):
    text, value = expression
    assert evaluate(text).points == (value,)


@given(fractions(), fractions())
def test_rational_numbers_are_equal_if_they_are_the_same(a, b):
    assert same(written(a), written(b)) is (a == b)


@given(st.decimals(-(10**9), 10**9, allow_nan=False, places=4), st.integers(-300, 300))
def test_scientific_notation_is_the_number_that_it_writes(mantissa, exponent):
    value = Fraction(mantissa) * Fraction(10) ** exponent
    for form in (rf"{mantissa} \times 10^{{{exponent}}}", f"{mantissa}E{exponent:+d}"):
        assert evaluate(form).points == (value,)
        assert same(form, written(value)) is True
        if value:
            assert same(form, written(value * Fraction(1001, 1000))) is False
            assert same(form, rf"{mantissa} \times 10^{{{exponent + 1}}}") is False


@pytest.mark.parametrize(
    "one, other, verdict",
    [
        # to 6 decimals, and where a number is small to 6 significant digits
        ("0.333333", r"\frac13", True),
        ("0.33333", r"\frac13", False),
        ("1.4142136", r"\sqrt2", True),
        ("1.41421", r"\sqrt2", False),
        ("0.0123457", r"\frac{1}{81}", True),
        ("0.012346", r"\frac{1}{81}", False),
        ("100.0000001", "100", True),
        ("100.000001", "100", False),
        # whole numbers exactly, however large
        ("123456789012345678901", "123456789012345678900", False),
        ("1e6", "1000001", False),
        # in scientific notation relatively
        ("6.02214076e23", "6.02214e23", True),
        (r"1.414214e10", r"\sqrt2 \times 10^{10}", True),
        ("10^10", "10^10 - 0.001", False),
        ("6.02214076e23", "6.0221e23", False),
        # what may be read in two ways is not decided here
        ("1/2x", "x/2", None),
        ("1/2x", "2x", None),
        (r"\sqrt{x^2}", "x", None),
    ],
)
def test_how_closely_numbers_must_agree(one, other, verdict):
    assert same(one, other) is verdict
    assert same(other, one) is verdict


@pytest.mark.parametrize(
    "one, other",
    [
        ("(x+y)^3", "x^3 + 3x^2y + 3xy^2 + y^3"),
        (r"\frac{x^2-1}{x-1}", "x+1"),
        (r"\sin 2\theta", r"2 \sin\theta \cos\theta"),
        (r"\sin^2 x + \cos^2 x", "1"),
        (r"\tan^{-1} x", r"\arctan(x)"),
        (r"\log_2 8", "3"),
        (r"e^{i\pi}", "-1"),
        (r"(1+i)^2", "2i"),
        (r"\frac{1}{\sqrt2}", r"\frac{\sqrt2}{2}"),
        (r"\sqrt{5+2\sqrt6} - \sqrt2 - \sqrt3", "0"),
        ("a^{-b}", "1/a^b"),
        ("f(x+1)", "f(1+x)"),
        (r"\piR^2", r"R^2 \pi"),
        (r"\sin 30^\circ", r"\frac12"),
    ],
)
def test_identities_hold(one, other):
    assert same(one, other) is True


@pytest.mark.parametrize(
    "one, other",
    [
        ("x", "X"),
        ("x_1", "x_2"),
        ("f(2)", "2f"),
        ("f(x)", "f(-x)"),
        ("x", "5"),
        ("2^{-2017}", "-2^{-2017}"),
        (r"\sqrt2 \times 10^{-90}", r"\sqrt3 \times 10^{-90}"),
        (r"\cos x", "1"),
        (r"\pi", "3.14159"),
    ],
)
def test_what_is_not_the_same_differs(one, other):
    assert same(one, other) is False


@pytest.mark.parametrize(
    "text",
    ["", "+", "(1", "1)", "2 3", "x^", r"\frac1", r"\sqrt{", r"\unknown", "1/0", "|x"]
    + [
        "9^{9^{9^9}}",
        "(10^9)!",
        "10^{1000000}",
        "1e99999",
        r"\exp(\exp(\exp(9)))",
        "?!",
        "5_8",
        "💥",
    ],
)
def test_what_has_no_value(text):
    assert evaluate(text) is None
