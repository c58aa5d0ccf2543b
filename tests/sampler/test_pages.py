"""The ledger of pages, by hand and against a count of owners per page."""

import collections

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.sampler.pages import PageLedger


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
