"""Sizes of programs: what a call gets, what is compiled for it, what padding costs."""

import math

import jax
import pytest
import small_run
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.parallel.mesh import make_mesh
from scalerl_jax.sampler.sizes import ProgramSizes, ladder
from scalerl_jax.wiring import make_architecture
from scalerl_jax.wiring.sampling import make_engine, make_tokenizer

SLOTS, PAGES = (8, 16, 32, 64), (2, 3, 4)
calls = st.lists(
    st.tuples(st.integers(1, SLOTS[-1]), st.integers(1, PAGES[-1])), max_size=300
)


def smallest(rows, pages):
    """The smallest size that holds a call, found by trying all."""
    return min(
        (math.prod(size), size)
        for size in ProgramSizes(SLOTS, PAGES, worth=0.0)
        if size[0] >= rows and size[1] >= pages
    )[1]


@settings(max_examples=200, deadline=None)
@given(calls=calls, worth=st.sampled_from((0.0, 50.0, 1000.0, math.inf)))
def test_a_call_is_held_and_its_padding_is_bounded(calls, worth):
    sizes, again = (ProgramSizes(SLOTS, PAGES, worth=worth) for _ in range(2))
    compiled, padding = set(), {}
    for call in calls:
        size = sizes.choose(*call)
        assert size == again.choose(*call)  # the calls alone decide
        least = smallest(*call)
        assert size[0] >= call[0] and size[1] >= call[1]
        if least in compiled:
            assert size == least
        if size not in compiled and size != least:
            held = [one for one in compiled if one[0] >= call[0] and one[1] >= call[1]]
            assert size == (SLOTS[-1], least[1]) and not held
        compiled.add(size)
        wasted = size[0] - size[0] * math.prod(least) / math.prod(size)
        padding[least] = padding.get(least, 0.0) + wasted
    assert all(wasted <= worth + 1e-9 for wasted in padding.values())
    if worth == 0.0:
        assert compiled == {smallest(*call) for call in calls}
    if worth == math.inf:
        assert len(compiled) <= len(PAGES)


def test_a_size_is_compiled_once_its_padding_has_cost_as_much():
    # The first program is the one that soon is needed; 56 of its rows are padding.
    sizes = ProgramSizes((8, 64), worth=500.0)
    assert [sizes.choose(5) for _ in range(10)] == [(64,)] * 8 + [(8,)] * 2
    assert sizes.choose(9) == (64,)
    # Half of the 64 rows' pages are padding: 32 rows' worth.
    wide = ProgramSizes((8, 64), (2, 4), worth=300.0)
    assert wide.choose(60, 4) == (64, 4)
    assert [wide.choose(60, 2) for _ in range(10)] == [(64, 4)] * 9 + [(64, 2)]


def test_what_a_few_calls_would_pay_is_compiled_at_once():
    sizes = ProgramSizes((8, 64), worth=400.0)
    assert [sizes.choose(5), sizes.choose(60), sizes.choose(5)] == [(8,), (64,), (8,)]


def test_all_that_are_compiled_are_used_at_once():
    sizes = ProgramSizes(SLOTS, PAGES, worth=math.inf)
    sizes.compile_all()
    assert [sizes.choose(*size) for size in sizes] == list(sizes)
    assert len(sizes) == 12 and sizes.largest == (64, 4)


@pytest.mark.parametrize(
    "first, last, steps, sizes",
    [
        (8, 128, (1,), (8, 16, 32, 64, 128)),
        (64, 100, (1,), (64, 100)),
        (5, 5, (1,), (5,)),
        (8, 3, (1,), (3,)),
        (2, 40, (1.0, 1.5), (2, 3, 4, 6, 8, 12, 16, 32, 40)),
    ],
)
def test_a_ladder_doubles(first, last, steps, sizes):
    assert ladder(first, last, steps=steps) == sizes


@pytest.mark.parametrize("staleness, few", [(0, False), (4, True)])
def test_only_a_run_that_is_not_synchronous_pads_its_calls(staleness, few):
    config = small_run.make_config({"queue.max_staleness": staleness})
    arch = make_architecture(config)
    engine = make_engine(
        config, arch, make_tokenizer(config, arch), make_mesh(jax.devices()[:1])
    )
    sizes = engine.decode_sizes
    assert len(sizes) > 1
    assert (sizes.choose(1, 1) != next(iter(sizes))) == few
