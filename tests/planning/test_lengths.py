"""Lengths of a run and of a file, and the rows that they fill."""

import dataclasses
import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax import config as config_lib
from scalerl_jax.model.attention_kernels import needed_blocks
from scalerl_jax.planning.lengths import (
    Lengths,
    attention_share,
    count_blocks,
    count_microbatches,
    count_rows,
    read_lengths,
)

_SETTINGS = config_lib.defaults()
_SETTINGS.model.architecture = "tiny"
CONFIG = config_lib.resolve(_SETTINGS)


def test_a_file_lists_completions(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("100\n\n300\n99999999\n")
    found = read_lengths(str(path), CONFIG)
    # The last is cut off at the limit of the config.
    assert found.completions == (100, 300, CONFIG.sampler.max_completion_tokens)
    assert "3 completions" in found.source


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    "logged, longest",
    [
        pytest.param([{"tokens": 10}] * 39 + [{"tokens": 50}], 50, id="spread as seen"),
        pytest.param([{"tokens": 10}] * 5, 11 * 3, id="too few: spread as assumed"),
    ],
)
def test_a_run_has_the_mean_of_its_last_steps(tmp_path, logged, longest):
    old = [{"completion/mean_tokens": 9000.0}] * 30
    write(
        tmp_path / "metrics.jsonl", [*old, *([{"completion/mean_tokens": 11.0}] * 20)]
    )
    write(tmp_path / "rollouts.jsonl", logged)
    found = read_lengths(str(tmp_path), CONFIG)
    assert found.mean == pytest.approx(11.0, rel=0.05)
    if len(logged) > 32:
        assert found.longest == longest
    else:
        assert found.longest < longest


@pytest.mark.parametrize("limit, mean, cut", [(64, 42.0, 42.0), (24, 42.0, 21.25)])
def test_a_run_whose_lengths_are_cut_off_has_their_mean(tmp_path, limit, mean, cut):
    """13, 39, 52 and 64 tokens; scaled by 42 / 32 and cut off they would have 37."""
    write(tmp_path / "metrics.jsonl", [{"completion/mean_tokens": mean}])
    lengths = [8, 24, 32, 64] * 10
    write(tmp_path / "rollouts.jsonl", [{"tokens": each} for each in lengths])
    sampler = dataclasses.replace(CONFIG.sampler, max_completion_tokens=limit)
    found = read_lengths(str(tmp_path), dataclasses.replace(CONFIG, sampler=sampler))
    assert found.mean == pytest.approx(cut)
    assert found.longest == limit


@pytest.mark.parametrize(
    "text, said",
    [
        pytest.param("abc\n", "give the directory of a run", id="no number"),
        pytest.param("0\n", "at least one token", id="no token"),
        pytest.param("", "at least one token", id="nothing"),
    ],
)
def test_what_is_no_length_is_refused(tmp_path, text, said):
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match="--lengths=") as error:
        read_lengths(str(path), CONFIG)
    assert said in str(error.value)


def test_no_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        read_lengths(str(tmp_path / "nowhere"), CONFIG)


def test_rollouts_share_rows_as_the_learner_lays_them_out(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("100\n")
    found = read_lengths(str(path), CONFIG)
    used = round(found.prompt) + 99
    rows = count_rows(found, rollouts=10, row_tokens=3 * used, row_segments=128)
    assert rows == 4
    assert count_rows(found, rollouts=10, row_tokens=3 * used, row_segments=1) == 10


@pytest.mark.parametrize(
    "completions, short_rows, expected",
    [
        pytest.param((100,) * 3, (), 2, id="whole rows"),
        pytest.param((100,) * 3, (30, 60, 90), 2, id="longer than three quarters"),
        pytest.param((100, 100, *[50] * 3), (30, 60, 90), 2, id="three in two rows"),
        pytest.param((100, 100, 50, 50), (30, 60, 90), 1.5, id="two in two halves"),
        pytest.param((100, 100, 51), (30, 60, 90), 1.5, id="one in half a row"),
        pytest.param((100, 100, 80), (30, 60, 90), 1.75, id="three quarters"),
        pytest.param((20, 20), (30, 60, 90), 0.25, id="a microbatch alone"),
    ],
)
def test_a_microbatch_of_short_rows_counts_as_its_share(
    completions, short_rows, expected
):
    found = Lengths(prompt=1.0, completions=completions, source="")
    count = count_microbatches(
        found,
        rollouts=len(completions),
        row_tokens=120,
        row_segments=128,
        rows=2,
        short_rows=short_rows,
    )
    assert count == expected


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 40), max_size=8), st.sampled_from([1, 8]))
def test_blocks_of_a_row_are_those_of_the_kernel(used, size):
    used = [each for each, end in zip(used, np.cumsum(used), strict=True) if end <= 64]
    ids = np.zeros(64, np.int32)
    filled = np.repeat(np.arange(len(used)) + 1, used)
    ids[: len(filled)] = filled
    kernel = needed_blocks(jnp.arange(64), jnp.asarray(ids), size=size)
    assert count_blocks(used, 64, size=size) == kernel.sum()


def test_a_microbatch_waits_for_the_row_with_most_blocks():
    # Rows of 4 blocks: 10 below the diagonal; halves have 3 each, and padding 4.
    found = Lengths(prompt=0.0, completions=(2049, 1025, 1025), source="")
    share = functools.partial(
        attention_share, found, rollouts=3, row_tokens=2048, row_segments=128
    )
    assert share(rows=1, shards=1) == pytest.approx((10 + 6) / 2 / 10)
    assert share(rows=2, shards=2) == pytest.approx(10 / 10)
    assert share(rows=2, shards=1) == pytest.approx((10 + 6) / 20)
    assert share(rows=4, shards=2) == pytest.approx((10 + 6) / 20)
    assert share(rows=4, shards=4) == pytest.approx(10 / 10)
