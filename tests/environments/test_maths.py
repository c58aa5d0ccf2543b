"""Maths answers: known pairs, what is an answer, and input that means harm."""

import contextlib
import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_jax.environments.judges import comparing, maths
from scalerl_jax.environments.pool import VerifierPool
from scalerl_jax.environments.verdict import Verifier

PAIRS = [
    line.split("\t")
    for line in Path(__file__).with_name("math_pairs.tsv").read_text().splitlines()
]


def judge(text, *expected, answer_from="boxed"):
    reference = {"answer": list(expected)}
    return maths.judge("any", text, reference, answer_from=answer_from).status


def test_the_table_of_pairs_is_large():
    assert len(PAIRS) >= 350
    assert sum(verdict == "different" for verdict, *_ in PAIRS) >= 120


@pytest.mark.parametrize("verdict, expected, answer", PAIRS)
def test_known_pairs(verdict, expected, answer):
    wanted = {"equal": "correct", "different": "wrong", "unreadable": "unparsable"}
    status = judge(rf"Hence the answer is $\boxed{{{answer}}}$.", expected)
    assert status == wanted[verdict]


@pytest.mark.parametrize(
    "answer_from, statuses",
    [
        ("boxed", ["correct", "no_answer", "no_answer"]),
        ("last_number", ["wrong", "correct", "no_answer"]),
        ("boxed_else_last_number", ["correct", "correct", "no_answer"]),
    ],
)
def test_where_the_answer_is_looked_for_is_a_setting(answer_from, statuses):
    texts = [r"\boxed{7} after 4 steps", "it is 7", "I do not know"]
    assert [judge(text, "7", answer_from=answer_from) for text in texts] == statuses


def test_each_of_several_right_answers_is_right():
    assert judge(r"\boxed{0.5}", "7", r"\frac12") == "correct"
    assert judge(r"\boxed{0.6}", "7", r"\frac12") == "wrong"
    assert judge(r"\boxed{8}", r"\boxed{8}") == "correct"
    assert maths.expected_answers({"answer": 8}) == ["8"]


@pytest.mark.parametrize("text", [r"\boxed{}", r"\boxed{ $ $ }", r"\boxed{\,.}"])
def test_an_empty_box_is_no_answer(text):
    assert judge(text, "7") == "no_answer"


@pytest.mark.parametrize(
    "answer", ["{", r"\frac{1", "?!", "(" * 400, "1" * 5000, "\x00", "\ud800", "💥"]
)
def test_what_cannot_be_read_is_unparsable(answer):
    assert judge(rf"\boxed{{{answer}}} \boxed{{{answer}}}", "7") in {
        "unparsable",
        "no_answer",
    }


_PIECES = (
    r"1 2 9 0.5 x e n ( ) [ ] { } \{ \} ^ _ ! + - * / , ; = < | % : & \\ ' \frac \sqrt"
    r" \le \pm \pi \sin \exp \infty \text{ and yes cm \cup \begin{pmatrix} \approx"
    r" \end{pmatrix} \overline \binom \lfloor \rfloor 10^ \circ \left \right \mathbb"
).split()


@given(*[st.lists(st.sampled_from(_PIECES), max_size=12).map(" ".join)] * 2)
def test_no_answer_makes_the_comparison_fail(expected, found):
    with pytest.MonkeyPatch.context() as patched:
        # The last rule is SymPy's, which only its process can bound.
        patched.setattr(comparing, "_RULES", comparing._RULES[:-1])
        assert comparing.same_answer(expected, found) in (True, False, None)
        comparing._same.cache_clear()  # before others compare by all rules


@pytest.mark.parametrize("reference", [{}, {"answer": None}, {"answer": []}])
def test_a_reference_without_an_answer_is_refused(reference):
    with pytest.raises(ValueError, match="needs an 'answer'"):
        maths.judge("any", r"\boxed{7}", reference, answer_from="boxed")


@pytest.mark.parametrize(
    "answer",
    [
        *("e^e", r"\sec^2 t", "m^n - m", "f(x) = c", "true", r"\mathbb{Z}_2"),
        *("a + b + c", r"\dfrac{2469}{20,\!000}", r"\{2, 3, \ldots\}", r"6 \mid ab"),
        *(r"p \equiv 1 \pmod{4}", r"n = 6k + 1 \text{ for integer } k"),
    ],
)
def test_a_reference_like_this_can_be_judged_by(answer):
    assert maths.check("any", "", {"answer": answer}) == 1.0
    assert judge(r"\boxed{0}", answer) == "wrong"


def test_a_reference_that_cannot_be_read_is_an_error_unless_repeated():
    assert judge(r"\boxed{?!}", "?!") == "correct"
    with pytest.raises(ValueError, match="cannot be read: '\\?!'"):
        judge(r"\boxed{7}", "?!")
    with pytest.raises(ValueError, match="cannot be read: '\\?!'"):
        maths.check("any", "", {"answer": ["7", "?!"]})
    with pytest.raises(ValueError, match="cannot be read: "):
        maths.check("any", "", {"answer": r"\frac{1}{2} \rfloor"})
    assert maths.check("any", "", {"answer": ["7", r"\frac12"]}) == 1.0


@pytest.mark.parametrize("answer", [r"1\approx", r"\}\approx", r"\}_\approx 1"])
def test_an_answer_cannot_make_the_verifier_fail(answer):
    assert judge(rf"\boxed{{{answer}}}", "7") in ("wrong", "unparsable", "no_answer")
    assert comparing.same_answer("7", answer) is not True


@pytest.mark.parametrize("shape", ["{0}", r"\text{{{0}}}", r"\operatorname{{{0}}}"])
def test_no_answer_is_run_as_python(shape, tmp_path):
    marker = tmp_path / "ran"
    for attempt in (
        f"__import__('os').system('touch {marker}')",
        f"open('{marker}','w')",
        f"[open('{marker}', 'w') for _ in (1,)]",
        f"(lambda: open('{marker}', 'w'))()",
        f'S(\'open("{marker}", "w")\')',
        f"7 if open('{marker}', 'w') else 7",
    ):
        text = rf"\boxed{{{shape.format(attempt)}}}"
        for answer_from in ("boxed", "last_number"):
            assert judge(text, "77", answer_from=answer_from) != "correct"
    assert not marker.exists()


# The first are judged or refused at once; the second would take hours and gigabytes.
QUICK = {
    "brackets": rf"\boxed{{{'(' * 50_000}{')' * 50_000}}}",
    "open braces": "{" * 100_000,
    "open boxes": r"\boxed{" * 14_000,
    "backslashes": "\\" * 100_000,
    "digits": "1" * 100_000,
    "separators": rf"\boxed{{{',;' * 30_000}x}}",
    "numbers": "1," * 50_000,
    "signs": "-" * 100_000,
    "spaces": rf"\boxed{{1{' ' * 100_000}x}}",
    "radicals": r"\boxed{" + r"\sqrt{2+" * 14 + "1" + "}" * 15,
    "dollars": rf"\boxed{{{'$' * 900}}}",
    "equations": rf"\boxed{{{'1=' * 400}1}}",
    "commas": rf"\boxed{{{'1,' * 400}1}}",
    "expansion": r"\boxed{(a+b+c+d+e+f+g+h)^{200}-1}",
}
# Refused by their size, as references too, before anything computes them.
LARGE = (
    *(r"99999!", r"9^{9^{9}}", r"100000!!", r"\prod^{10^6}", r"x<9^9^9", r"(10^5)!>5"),
    *(r"\sum_{k=1}^{10^{7}} k^{k}", r"\prod_{k=10^7}^{n} k", r"9^{9^{9^{9}}} \cup x"),
    *(r"\sum_{k=1}^{900} k^{k}", r"\sum^{900}_{k = 1} k!", r"\prod_{k=1}^{300} x^{2k}"),
    *(r"\sum_{\ell=1}^{900} \ell^{\ell}", r"900!! + \int x dx", r"900!!! \cup x"),
    *(
        r"\int_0^1 x^{10^8} dx",
        r"x \in [((10^{999})^{999})^{999}, 5]",
        r"\Gamma(9^{9^9})",
    ),
    *("*".join(["10000!"] * 100), "+".join(["10000!/9999!"] * 80)),
    r"\binom{1000000}{500000} + \int x dx",
)
ENDLESS = {"product": r"\boxed{\prod_{k=1}^{900} (1+k^{2})}"}


@pytest.fixture(scope="module")
def pool():
    settings = {"answer_from": "boxed_else_last_number"}
    made = VerifierPool(
        score="math:exp",
        named={
            "math": Verifier("scalerl_jax.environments.judges.maths:judge", settings)
        },
        timeout_s=2.0,
        num_workers=2,
        memory_mib=1024,
    )
    yield made
    made.close()


def test_harmful_answers_take_bounded_time_and_spoil_no_other(pool, monkeypatch):
    # A busy machine may give them little time to compute.
    monkeypatch.setattr("scalerl_jax.environments.verdict._COMPUTING", 0.001)
    answers = [r"\boxed{7}", *QUICK.values(), *ENDLESS.values(), r"\boxed{7.0}", None]
    pool.submit(0, "any", answers, {"verifier": "math", "answer": "7"})
    found = []
    while not found:
        pool.wait(120.0)
        found = pool.poll()
    (verdicts,) = found
    first, *others, last, none = verdicts.statuses
    assert (first, last, none) == ("correct", "correct", "no_answer")
    assert "correct" not in others
    assert others[len(QUICK) :] == ["too_costly"] * len(ENDLESS)


@pytest.mark.parametrize("answer", LARGE)
def test_what_is_large_is_refused_at_once(answer):
    start = time.process_time()
    assert judge(rf"\boxed{{{answer}}}", "7") in ("unparsable", "wrong")
    assert judge(rf"\boxed{{{answer}}}", r"(-\infty, 7) \cup (8, 9)") != "correct"
    assert judge(rf"\boxed{{{answer}}}", answer) == "correct"
    for found in ("7", "x < 8", r"(-\infty, 7) \cup (8, 9)"):
        with contextlib.suppress(ValueError):
            assert judge(rf"\boxed{{{found}}}", answer) != "correct"
    assert time.process_time() - start < 6.0


@pytest.mark.parametrize(
    "answer, value",
    [
        (r"\sum_{k=1}^{9} k^{k}", sum(k**k for k in range(1, 10))),
        (r"\sum_{k=1}^{900} k^{2}", 900 * 901 * 1801 // 6),
    ],
)
def test_sums_that_are_small_are_computed(answer, value):
    assert judge(rf"\boxed{{{answer}}}", str(value)) == "correct"
    assert judge(rf"\boxed{{{answer}}}", str(value + 1)) == "wrong"


@pytest.mark.parametrize(
    "answer", ["2024!", "2025!!", r"\binom{2000}{1000}", "3^{10000}"]
)
def test_what_can_be_computed_is_not_too_large(answer):
    assert judge(rf"\boxed{{{answer} + 0}}", answer) == "correct"
    assert judge(rf"\boxed{{{answer} + 1}}", answer) == "wrong"


def test_a_prompt_that_names_an_unknown_verifier_is_refused(pool):
    with pytest.raises(ValueError, match=r"'maths'; choose from \['math'\]"):
        pool.submit(0, "any", ["7"], {"verifier": "maths", "answer": "7"})


def test_the_reference_is_json(pool):
    reference = json.loads('{"verifier": "math", "answer": 7}')
    pool.submit(1, "any", ["so 7", "so 8", "so"], reference)
    pool.wait(60.0)
    statuses = [verdicts.statuses for verdicts in pool.poll()]
    assert statuses == [["correct", "wrong", "no_answer"]]
