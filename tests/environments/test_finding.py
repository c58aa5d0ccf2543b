r"""The final answer of a completion: boxes, lists of boxes, last numbers."""

import pytest

from scalerl_jax.environments.judges import finding, maths


@pytest.mark.parametrize(
    "text, inside",
    [
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}} {", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {3}", "3"),
        (r"\fbox{1} \fboxed{2}", "2"),
        (r"So it is \fbox{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1}, no: \fbox{2}", "2"),
        (r"\boxed{1}, no: \fbox{2", None),
        (r"\fbox{7}, \fboxsep{2pt}", "7"),
        (r"\boxed{1} and \boxed{2", None),
        (r"\boxed{1}, no: \boxed{\frac{1}{", None),
        (r"First \boxed{3}; really \boxed{12}.", "12"),
        (r"a set \{ and \boxed{4}", "4"),
        (r"\boxed{\boxed{4}}", "4"),
        (r"} \boxed{5}", "5"),
        (r"\boxed{}", ""),
        (r"\\boxed{6}", None),
        (r"\boxed 7.", "7"),
        (r"$\boxed12$", "12"),
        (r"$\boxed 3/4$", "3/4"),
        (r"$\boxed x$", "x"),
        (r"$\boxed\pi$", r"\pi"),
        (r"\boxed{5}, in \boxed form", "5"),
        (r"$\boxed{5}$ and $\boxed x^2$", "5, x^2"),
        (r"$\boxed 7 + 2$", "7 + 2"),
        (r"$\boxed 2 \pi$", r"2 \pi"),
        (r"$\boxed\frac{1}{2}$, done", r"\frac{1}{2}"),
        (r"$\boxed 3, 5$", "3, 5"),
        (r"\boxed 7, which is odd", "7"),
        (r"\boxed A and B", "A and B"),
        (r"\boxed{12}, no, \boxed", None),
        (r"\boxed{12}, no, $\boxed$", None),
        ("7", None),
    ],
)
def test_the_last_box_with_balanced_braces_holds_the_answer(text, inside):
    assert finding.last_boxed(text) == inside


@pytest.mark.parametrize(
    "text, formula",
    [
        ("It costs $1,234.50.", "1,234.50"),
        ("from 3 to -4", "-4"),
        ("10-3", "10-3"),
        ("one half, or 1/2.", "1/2"),
        ("about 25%", "25%"),
        ("x2 = .5", ".5"),
        ("in 2024, 12", "12"),
        ("so 4.5e33", "4.5e33"),
        ("or 4.5E+33 kg", "4.5E+33"),
        (r"is $8.7 \times 10^{8}$.", r"8.7 \times 10^{8}"),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text, formula):
    assert finding.last_formula(text) == formula


@pytest.mark.parametrize(
    "text, answer",
    [
        (r"$\boxed{3}$ and $\boxed{-4}$", "3, -4"),
        (r"$x = \boxed{3}$ or $x = \boxed{-4}$", "x = 3, x = -4"),
        (r"$y = \boxed{5}$, $x_1 = \boxed{2}$", "y = 5, x_1 = 2"),
        (r"$\boxed{2}$, $\boxed{5}$, and $\boxed{9}$", "2, 5, 9"),
        (r"\boxed{2},\quad\boxed{5}\text{ and }\boxed{9}", "2, 5, 9"),
        (r"\boxed{6}, \boxed{6}", "6"),
        ("\\boxed{5}\n\n\\boxed{6}", "6"),
        (r"\boxed{3}. Wait, it is \boxed{8}", "8"),
        (r"\boxed{3}, or rather \boxed{8}", "8"),
        (r"\boxed{3} or, more exactly, \boxed{8}", "8"),
        (r"\boxed{1}. Then \boxed{2} and \boxed{3}", "2, 3"),
    ],
)
def test_boxes_with_only_a_separator_between_are_one_list(text, answer):
    assert finding.last_boxed(text) == answer


@pytest.mark.parametrize(
    "text, formula",
    [
        (r"The answer is $\frac{3}{4}$.", r"\frac{3}{4}"),
        (r"**Answer:** $2\sqrt{3}$", r"2\sqrt{3}"),
        ("The answer is $x^2$.", "x^2"),
        (r"so \(x = 5\)", "5"),
        ("so $2 + 3 = 5$", "5"),
        ("$5 = x$", "x"),
        (r"\[ 3, 4 \]", "3, 4"),
        (r"\[ a \\[2pt] 3, 4 \]", r"a \\[2pt] 3, 4"),
        (r"it is \frac{3}{4}.", r"\frac{3}{4}"),
        ("it is x^2.", "x^2"),
        (r"$y = 1$, so it is 7", "7"),
        ("It costs $5 and $7, so $12.", "12"),
        ("$1 + $2 + $3 is $6", "6"),
        ("She pays $18", "18"),
        (r"She pays \$18", "18"),
        ("it is 2 3/4 cups", "2 3/4"),
        ("x2 = .5", ".5"),
        ("**5**", "5"),
        ("it is 3 / 4", "3 / 4"),
        ("it is 2*3", "2*3"),
        ("so 2 + 3 = 5 in all", "5"),
        ("it is √3", "√3"),
        ("it is 3√5", "3√5"),
        ("it is sqrt(3).", "sqrt(3)"),
        ("it is log 3", "log 3"),
        ("it is 2π", "2π"),
        ("it is 2 pi", "2"),
        ("it is 5x", "5x"),
        ("it is 3-5i", "3-5i"),
        ("it is −42", "−42"),
        ("it is - 42", "- 42"),
        ("- 42 apples", "42"),
        ("it is negative 42", "negative 42"),
        ("it is 2 million", "2 million"),
        ("it is 5 squared", "5 squared"),
        ("it is 10 000", "10 000"),
        ("it is 3 7", "3 7"),
        ("it is 10⁻²", "10⁻²"),
        ("it is 2 ⅓", "2 ⅓"),
        ("it is (3, 5).", "(3, 5)"),
        ("five (that is, 5)", "5"),
        ("it is f(3)", "f(3)"),
        ("it is 0.333...", "0.333..."),
        ("it is 0.(3)", "0.(3)"),
        ("it is x > 5", "x > 5"),
        ("it is 5 (mod 7)", "5 (mod 7)"),
        ("Step 2: it is 5.", "5"),
        ("1. 42", "42"),
        ("She has a 5.", "5"),
        ("Answer: 5 apples", "5"),
        ("12 cm", "12"),
        ("it is 5, and I am sure", "5"),
        ("no idea", None),
    ],
)
def test_the_last_number_is_taken_with_its_formula(text, formula):
    assert finding.last_formula(text) == formula


@pytest.mark.parametrize("answer_from", ["boxed", "boxed_else_last_number"])
def test_a_box_that_is_cut_off_withdraws_the_one_before(answer_from):
    text = r"A first try gives \boxed{12}. But no: \boxed{6"
    assert finding.find_answer(text, answer_from) is None


def test_many_signs_take_linear_time():
    """A quadratic search would take minutes here, and the test's limit ends it."""
    assert finding.last_boxed("{" * 200_000 + r"\boxed{1}") == "1"
    assert finding.last_boxed(r"\boxed{" * 50_000) is None
    assert finding.last_boxed(r"\boxed{1}, " * 20_000) == "1"
    assert finding.last_formula("$" * 100_000 + " 7") is not None
    assert finding.last_boxed(r"\ \boxed 1, " * 20_000) == "1"
    for many in (
        *("(", "1 ", "1 + ", "\\a", "\\a{", "|", "x", "-", "√", "[1,", " "),
        *(r"\(", r"\[", r"\( \["),
    ):
        assert finding.last_formula(many * 30_000 + " 7 " + many * 30_000)
        assert finding.last_boxed(r"\boxed 7" + many * 30_000) != ""
    for item in ("1,", "-1,", "1/2,", "x,", "1, "):  # a list in brackets, and no end
        assert finding.last_formula("(" + item * 40 + "and so on: 7") == "7"
    for many in (r"\,", r"\\", r"\,\ ", ";\\", r"\quad\,"):
        assert maths.normalized("7" + many * 4000 + "x") != "7"
        assert maths.normalized("7" + many * 4000) == "7"
