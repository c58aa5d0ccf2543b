"""The ledger of pages, by hand and against a count of owners per page."""

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.sampler.pages import PageLedger, page_digests


def test_the_lowest_free_page_is_taken_first():
    ledger = PageLedger(4)
    assert ledger.take(3) == [0, 1, 2]
    assert (ledger.free, ledger.in_use) == (1, 3)
    ledger.release([1])
    assert ledger.take(2) == [1, 3]
    assert ledger.free == 0


def test_a_shared_page_is_free_when_its_last_owner_leaves():
    ledger = PageLedger(3)
    pages = ledger.take(2)
    again = ledger.share(pages[:1])
    ledger.release(pages)
    assert ledger.in_use == 1 and ledger.take(2) == [1, 2]
    ledger.release(again)
    assert ledger.take(1) == [0]


def test_a_shared_list_is_not_the_owners_own():
    ledger = PageLedger(3)
    pages = ledger.take(2)
    ledger.share(pages).append(2)
    assert pages == [0, 1]


def test_more_pages_than_are_free_are_refused_whole():
    ledger = PageLedger(3)
    ledger.take(1)
    with pytest.raises(AssertionError, match="3 pages needed, 2 free"):
        ledger.take(3)
    assert ledger.free == 2 and ledger.take(2) == [1, 2]
    assert ledger.take(0) == []


def test_a_page_without_an_owner_cannot_lose_one():
    ledger = PageLedger(3)
    pages = ledger.take(1)
    ledger.release(pages)
    with pytest.raises(AssertionError, match="page 0 has no owner to lose"):
        ledger.release(pages)


def test_the_peak_is_the_most_pages_at_one_time():
    ledger = PageLedger(5)
    ledger.release(ledger.take(4))
    ledger.share(ledger.take(1))
    assert (ledger.peak, ledger.in_use) == (4, 1)


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["take", "share", "release"]), st.integers(0, 9)),
    max_size=60,
)


@settings(deadline=None, max_examples=200)
@given(size=st.integers(1, 9), operations=OPERATIONS)
def test_a_page_is_free_if_and_only_if_nobody_owns_it(size, operations):
    ledger, holders, peak = PageLedger(size), [], 0
    for name, number in operations:
        owners = collections.Counter(page for pages in holders for page in pages)
        if name == "take":
            if number > size - len(owners):
                with pytest.raises(AssertionError):
                    ledger.take(number)
                continue
            taken = ledger.take(number)
            assert len(set(taken)) == number and not set(taken) & set(owners)
            assert all(0 <= page < size for page in taken)
            holders.append(taken)
        elif holders:
            place = number % len(holders)
            if name == "share":
                holders.append(ledger.share(holders[place][: number // 2]))
            else:
                ledger.release(holders.pop(place))
        owned = {page for pages in holders for page in pages}
        assert (ledger.in_use, ledger.free) == (len(owned), size - len(owned))
        peak = max(peak, len(owned))
        assert ledger.peak == peak
    for pages in holders:
        ledger.release(pages)
    assert sorted(ledger.take(size)) == list(range(size))


NAMED = st.lists(
    st.tuples(
        st.sampled_from(["take", "release", "know", "find", "forget"]),
        st.integers(0, 9),
        st.integers(0, 5),
    ),
    max_size=80,
)


class Written:
    """Pages of a ledger; whoever takes one writes something else into it."""

    def __init__(self, size):
        self.ledger, self.holders = PageLedger(size), []
        self.holds, self.written = {}, 0  # page -> what was written into it last
        self.names = {}  # (group, digest) -> what the page with this name holds

    def take(self, number, key):
        pages = self.ledger.take(min(number, self.ledger.free))
        for page in pages:
            self.written += 1
            self.holds[page] = self.written
        self.holders.append(pages)

    def release(self, number, key):
        if self.holders:
            self.ledger.release(self.holders.pop(number % len(self.holders)))

    def know(self, number, key):
        for page in (
            self.holders[number % len(self.holders)][:1] if self.holders else ()
        ):
            known = self.find(0, key)
            self.ledger.know(page, *key)
            if not known and self.ledger.find(key[0], key[1:]):
                self.names[key] = self.holds[page]

    def find(self, number, key):
        found = self.ledger.find(key[0], key[1:])
        for page in found:
            assert self.holds[page] == self.names[key]
            if number:
                self.holders.append(self.ledger.share([page]))
        return found

    def forget(self, number, key):
        self.ledger.forget(key[0])
        assert not any(self.ledger.find(key[0], [bytes([each])]) for each in range(6))


@settings(deadline=None, max_examples=300)
@given(size=st.integers(1, 6), operations=NAMED)
def test_a_page_that_is_found_holds_what_it_was_said_to_hold(size, operations):
    pages = Written(size)
    for name, number, digest in operations:
        getattr(pages, name)(number, ("ab"[number % 2], bytes([digest])))
        owned = {page for held in pages.holders for page in held}
        ledger = pages.ledger
        assert (ledger.in_use, ledger.free) == (len(owned), size - len(owned))
    for held in pages.holders:
        pages.ledger.release(held)
    assert sorted(pages.ledger.take(size)) == list(range(size))


def test_a_found_page_is_the_last_to_be_taken():
    """By hand: first one that holds nothing, then the end of the first released."""
    ledger = PageLedger(5)
    pages = ledger.take(4)
    for page in pages:
        ledger.know(page, "any", bytes([page]))
    assert ledger.find("any", [b"\0", b"\1", b"\5", b"\2"]) == [0, 1]
    ledger.release([0, 1])
    ledger.release([2, 3])
    assert (ledger.free, ledger.in_use) == (5, 0)
    assert ledger.take(2) == [4, 1]
    assert ledger.find("any", [b"\0", b"\1"]) == [0]
    assert ledger.share([0]) == [0]  # nobody had it
    assert ledger.take(1) == [3] and ledger.free == 1
    ledger.release([0])
    ledger.forget("any")
    assert ledger.find("any", [b"\0"]) == [] and ledger.take(2) == [2, 0]


@given(tokens=st.lists(st.integers(-9, 9), max_size=12), size=st.integers(1, 4))
def test_digests_are_those_of_all_tokens_up_to_the_end_of_a_page(tokens, size):
    digests = page_digests(np.array(tokens, np.int32), size)
    assert len(digests) == len(tokens) // size
    for count, digest in enumerate(digests, 1):
        begin = tokens[: count * size]
        assert page_digests(np.array(begin, np.int32), size)[-1] == digest
        other = [*begin[:-1], begin[-1] + 1]
        assert page_digests(np.array(other, np.int32), size)[-1] != digest
        if begin[0] != 7:
            other = [7, *begin[1:]]
            assert page_digests(np.array(other, np.int32), size)[-1] != digest
