"""Lengths of a run and of a file."""

import json

import pytest

from scalerl_jax import config as config_lib
from scalerl_jax.planning.lengths import count_rows, read_lengths

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
