"""Which questions are kept: duplicates, overlap with evaluation, lengths, draws."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.data.questions import Question
from scalerl_jax.data.splits import (
    HELD_OUT,
    TRAIN,
    Overlap,
    Sieve,
    Wording,
    draw_order,
    normalized,
)


def words(text, *, verifier="math"):
    return Question(task="any", text=text, reference={"verifier": verifier})


def count_words(questions):
    return [len(question.text.split()) for question in questions]


PLAIN = Wording()  # of a data set that says nothing with its questions


def against(texts, *, ngram):
    return Overlap([PLAIN.read(text) for text in texts], ngram=ngram)


def select(texts, *, count=None, order=None, **changes):
    settings = {"count_tokens": count_words, "max_tokens": 100, "seen": set()} | changes
    order = np.arange(len(texts)) if order is None else np.array(order)
    return Sieve(**settings).select(
        [words(text) for text in texts], order, count=count, wording=Wording()
    )


@pytest.mark.parametrize(
    "one, other",
    [
        pytest.param("What is  2 + 3?", "what is 2 + 3", id="space, case, end"),
        pytest.param("Find $x$, if $x^2=4$.", r"find \(x\) if \(x^2 = 4\)", id="LaTeX"),
        pytest.param("ﬁve ½", "five 1⁄2", id="NFKC"),
        pytest.param("{“a”, 'b'}", "a; b", id="quotes and braces"),
        pytest.param("f’(2) of O’Neil!", "f'(2) of O'Neil", id="apostrophes"),
        pytest.param("Go: it's 3.", "go, it’s 3", id="ends"),
    ],
)
def test_one_question_typeset_in_two_ways_is_the_same(one, other):
    assert normalized(one) == normalized(other)


@pytest.mark.parametrize(
    "one, other",
    [
        ("3 + 4", "3 - 4"),
        ("3 * 4", "3 / 4"),
        ("(3 + 4) * 5", "3 + (4 * 5)"),
        ("x < 4", "x > 4"),
        ("2 × 3", "2 ÷ 3"),
        ("12 3", "1 23"),
        ("What is 5!?", "What is 5?"),
        ("(2n)!", "2n!"),
        ("(n + 1)! / n!", "(n + 1) / n"),
        ("f'(2)", "f(2)"),
        ("y'' + y = 0", "y' + y = 0"),
        ("1.5 + 2", "1 5 + 2"),
        ("at 3:45", "at 3, 45"),
        ("x != y", "x = y"),
    ],
)
def test_what_makes_another_problem_is_kept(one, other):
    assert normalized(one) != normalized(other)


@given(st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_normalised_text_stays_as_it_is(text):
    assert normalized(normalized(text)) == normalized(text)


@pytest.mark.parametrize(
    "one, other",
    [
        ("Solve:\n#..#\n#S.#", "Solve:\n#.##\n#S.#"),
        ("Solve:\n# . S", "Solve:\n. # S"),
        ("Solve: #S.#", "Solve: #.S#"),
        ("X _ O", "_ X O"),
        ("Flatten [[1],2]", "Flatten [1,[2]]"),
        ("Is ([)] balanced?", "Is [()] balanced?"),
        ("Complete: [ { [", "Complete: { [ {"),
        ("Decode .- -...", "Decode -... .-"),
        ("x & ~y", "x & y"),
    ],
)
def test_what_signs_draw_tells_questions_apart(one, other):
    """All rows but one were dropped, as duplicates or as equal to a held-out one."""
    assert normalized(one) == normalized(other)
    boxed = "Put the answer in \\boxed{}."
    texts = [f"{text} {boxed}" for text in (one, other, one)]
    assert select(texts).dropped == {"duplicate": 1}
    held_out = select(texts, seen=None, overlap=against(texts[:1], ngram=0))
    assert held_out.places.tolist() == [1]


def test_signs_that_typeset_tell_nothing_apart():
    """An instruction may have some, and then a data set without it is still found."""
    texts = [f"{text} Answer after ####." for text in (*ASKED, "Why is $7$ prime?")]
    wording = Wording.of([words(text) for text in texts])
    overlap = against(ASKED, ngram=0)
    assert all(overlap.reason(wording.read(text)) for text in texts[:-1])
    for one, other in (("$1,2$, ...", "1, 2, ..."), ("Is [[x]] odd?", "is $x$ odd")):
        assert against([one], ngram=0).reason(PLAIN.read(other)) == "equals_evaluation"
        assert against([other], ngram=0).reason(PLAIN.read(one)) == "equals_evaluation"


def test_a_system_message_tells_questions_apart_but_hides_none_of_an_evaluation():
    asked = [
        Question(task="any", text=text, reference={}, system=system)
        for text, system in (
            ("Good day", "In French."),
            ("Good day", "In German."),
            ("Good day!", "in french"),
            ("Farewell", "In French."),
        )
    ]
    sieve = {"count_tokens": count_words, "max_tokens": 100, "seen": set()}
    sieve = Sieve(**sieve, overlap=against(["Farewell"], ngram=0))
    chosen = sieve.select(asked, np.arange(4), count=None, wording=PLAIN)
    assert chosen.places.tolist() == [0, 1]
    assert chosen.dropped == {"duplicate": 1, "equals_evaluation": 1}


def test_duplicates_are_counted_and_the_first_is_kept():
    chosen = select(["1 + 1", "2 + 2", "1 +  1", "3 + 3", "1 + 1?"])
    assert chosen.places.tolist() == [0, 1, 3]
    assert chosen.dropped == {"duplicate": 2}
    assert chosen.looked_at == 5


def test_duplicates_are_found_across_data_sets_and_may_be_kept():
    seen = set()
    select(["1 + 1"], seen=seen)
    assert select(["1 + 1", "2 + 2"], seen=seen).places.tolist() == [1]
    assert select(["1 + 1", "1 + 1"], seen=None).places.tolist() == [0, 1]


def test_too_long_and_empty_prompts_are_counted():
    chosen = select(["a b c d", "a b c", "a", ""], max_tokens=3)
    assert chosen.places.tolist() == [1, 2]
    assert chosen.dropped == {"over_long": 1, "empty": 1}
    assert chosen.longest == 4


def test_places_come_along_the_order_until_there_are_enough():
    chosen = select(["a", "b", "a", "c", "d"], order=[2, 0, 4, 3, 1], count=2)
    assert chosen.places.tolist() == [2, 4]
    assert chosen.looked_at == 3  # 0 equals 2
    assert select(["a"], count=5).places.tolist() == [0]
    assert select(["a"], count=0).places.tolist() == []


def test_there_is_a_place_for_every_verifier():
    questions = [words("a"), words("b", verifier="code"), words("c")]
    sieve = Sieve(count_tokens=count_words, max_tokens=9)
    chosen = sieve.select(questions, np.arange(3), count=None, wording=Wording())
    assert chosen.examples == (0, 1)


def test_the_digest_is_of_what_was_kept_in_any_order():
    texts = ["a", "b", "c"]
    digests = [
        select(texts).sha256,
        select(texts, order=[2, 1, 0]).sha256,
        select([*texts, "a"]).sha256,
        select(["a", "b", "d"]).sha256,
        select(texts, count=2).sha256,
    ]
    assert digests[0] == digests[1] == digests[2]
    assert len(set(digests)) == 3


def test_an_equal_prompt_overlaps_whatever_the_words():
    for ngram in (0, 13):
        overlap = against(["What is 2 + 3?"], ngram=ngram)
        assert overlap.reason(PLAIN.read("what is 2+3")) == "equals_evaluation"
        assert not overlap.reason(PLAIN.read("what is 2-3"))


def test_so_many_words_in_a_row_overlap():
    overlap = against(["a b c d, e f", "x y"], ngram=4)
    assert overlap.reason(PLAIN.read("Now: b c - d e!")) == "shares_ngram"
    assert not overlap.reason(PLAIN.read("a b c x d e f"))
    assert not overlap.reason(PLAIN.read("x y z w v"))
    chosen = select(["0 a b c d", "a b c", "x y", "p q"], overlap=overlap)
    assert chosen.places.tolist() == [1, 3]
    assert chosen.dropped == {"shares_ngram": 1, "equals_evaluation": 1}


letters = st.lists(st.sampled_from("abc"), max_size=12).map(" ".join)


@given(evaluation=st.lists(letters, max_size=3), text=letters, ngram=st.integers(0, 8))
@settings(max_examples=300, deadline=None)
def test_overlap_is_that_of_a_slow_search(evaluation, text, ngram):
    expected = ""
    found = text.split()
    for start in range(len(found) - ngram + 1) if ngram else ():
        part = f" {' '.join(found[start : start + ngram])} "
        if any(part in f" {other} " for other in evaluation):
            expected = "shares_ngram"
    if text in evaluation:
        expected = "equals_evaluation"
    found = against(evaluation, ngram=ngram).reason(PLAIN.read(text))
    assert found == expected


def test_a_phrase_of_many_evaluation_prompts_is_no_content():
    """The same 12 words end 4 prompts, and so may they a training prompt; not 3."""
    ending = "think step by step and put the final answer in a box"
    evaluation = [f"what is the {i} th prime number {ending}" for i in range(4)]
    training = PLAIN.read(f"how many even primes are there {ending}")
    assert not against(evaluation, ngram=8).reason(training)
    assert against(evaluation[:3], ngram=8).reason(training) == "shares_ngram"


def test_what_is_copied_beside_a_phrase_is_found():
    ending = "think step by step and put the final answer in a box"
    stories = [" ".join(f"w{i}x{j}" for j in range(9)) for i in range(40)]
    overlap = against([f"{story} {ending}" for story in stories], ngram=8)
    assert overlap.reason(PLAIN.read(f"{stories[7]} explain")) == "shares_ngram"
    assert not overlap.reason(PLAIN.read(f"something else {ending}"))


ASKED = [f"What is {i} + 1?" for i in range(40)]
WRAPPED = [f"Think.  Is it hard? {text} Put it in a box." for text in ASKED]


def test_what_is_said_with_every_question_is_its_wording():
    wording = Wording.of([words(text) for text in WRAPPED])
    assert wording.before == "think is it hard what is "
    assert wording.after == " + 1 put it in a box"
    assert [wording.read(text).core for text in WRAPPED] == [str(i) for i in range(40)]
    assert Wording.of([words(text) for text in ASKED]) == Wording("what is ", " + 1")
    unlike = [words(text) for text in (*ASKED, "Why?")]
    assert Wording.of(unlike) == PLAIN


def test_of_few_or_equal_questions_nothing_is_taken_away():
    assert Wording.of([words("What is 1 + 1?")] * 19) == PLAIN
    wording = Wording.of([words("What is 1 + 1?")] * 20)
    assert wording.read("What is 1 + 1?").core == "what is 1 + 1"


def test_instructions_hide_no_question_of_another_data_set():
    """As in GURU, which has questions of MATH between two sentences."""
    more = [*ASKED, "Why is 7 prime?"]
    wrapped = [f"Think.  Is it hard? {text} Put it in a box." for text in more]
    wording = Wording.of([words(text) for text in wrapped])
    for evaluation, training in [
        (map(PLAIN.read, more), map(wording.read, wrapped)),
        (map(wording.read, wrapped), map(PLAIN.read, more)),
        (map(wording.read, wrapped), map(wording.read, wrapped)),
    ]:
        overlap = Overlap(evaluation, ngram=0)
        assert {overlap.reason(each) for each in training} == {"equals_evaluation"}


def test_what_two_data_sets_ask_is_not_the_same_without_their_wordings():
    products = [text.replace("+", "*") for text in ASKED]
    wordings = [
        Wording.of([words(text) for text in set_]) for set_ in (ASKED, products)
    ]
    overlap = Overlap(map(wordings[0].read, ASKED), ngram=0)
    assert {overlap.reason(wordings[1].read(text)) for text in products} == {""}


def test_an_order_is_drawn_by_seed_and_purpose():
    orders = [
        draw_order(50, seed=seed, purpose=purpose).tolist()
        for seed in (0, 1)
        for purpose in (HELD_OUT, TRAIN)
    ]
    assert len(set(map(tuple, orders))) == 4
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert draw_order(50, seed=1, purpose=TRAIN).tolist() == orders[-1]
