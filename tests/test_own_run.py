"""A run from Python: rows and a function of a notebook or a script."""

import json
import runpy

import numpy as np
import pytest
import small_run

from scalerl_jax.formats.reading import read_json
from scalerl_jax.notebook import run

ROWS = [{"prompt": f"{n} + {n}", "reference": {"sum": 2 * n}} for n in range(60)]
MOST = 20
N = np.int64(3)


def score(prompt, completion, reference):
    """Partial credit, by the length alone: every group has a variance."""
    assert prompt.endswith("<think>") and prompt.startswith(str(reference["sum"] // 2))
    return min(1.0, len(completion) % 7 / 6 + len(completion) // 1000 * MOST)


def make_config(**changes):
    settings = runpy.run_path(str(small_run.ROOT / "configs/tiny.py"))["get_config"]()
    few = {"data.train_prompts": 0, "train.num_steps": 1, "eval.every": 1}
    settings.update_from_flattened_dict(small_run.SETTINGS | few | changes)
    return settings


@pytest.mark.slow
def test_a_run_from_python_has_its_rows_its_reward_and_its_evaluations(tmp_path, capfd):
    config = make_config()
    result = run(config, tmp_path, prompts=ROWS, reward=score)
    assert config.environment == "", "the caller's own is not changed"
    assert [row["step"] for row in result.evaluations] == [0, 1]
    assert result.fit is None and "cannot fix 3 parameters" in result.why_no_fit
    assert 0.0 < result.evaluations[-1]["reward_mean"] < 1.0
    rows = (tmp_path / "prompts.jsonl").read_text().splitlines()
    assert [json.loads(row) for row in rows] == ROWS
    text = (tmp_path / "reward.py").read_text()
    assert text.startswith("MOST = 20\n") and "small_run" not in text
    assert (tmp_path / "environment.py").read_text() == text
    (report,) = read_json(tmp_path / "data.json")["training"].values()
    assert report["kept"] == 60 - 9, "those of an evaluation are held out"
    # A mended function goes on from where the run is, and the run says so.
    capfd.readouterr()
    file = tmp_path / "mended" / "reward.py"  # the run may find it elsewhere
    file.parent.mkdir()
    file.write_text(text.replace("MOST = 20", "MOST = 30"))
    longer = make_config(**{"train.num_steps": 2})
    result = run(longer, tmp_path, prompts=ROWS, reward=f"{file}:score")
    assert [row["step"] for row in result.evaluations] == [0, 1, 2]
    said = capfd.readouterr().err
    assert f"warning: {file} has changed since this run began" in said
    (before,) = tmp_path.glob("environment-*.py")
    assert before.name in said and before.read_text() == text


@pytest.mark.parametrize(
    "workdir, reward, words",
    [
        ("gs://bucket/run", score, "workdir = 'gs://bucket/run' must be a directory"),
        ("here", lambda *_: 1.0, "must be made by def"),
        ("here", "mine.py", "environment = '.*mine.py' must be FILE.py:FUNCTION"),
    ],
)
def test_what_a_run_from_python_cannot_use_is_named(tmp_path, workdir, reward, words):
    place = workdir if "://" in workdir else tmp_path / workdir
    with pytest.raises(ValueError, match=words):
        run(make_config(), place, prompts=ROWS, reward=reward)


@pytest.mark.parametrize("workdir", [None, ""])
def test_no_workdir_is_not_the_current_directory(workdir):
    with pytest.raises(ValueError, match=f"workdir = {workdir!r} must be a directory"):
        run("tiny", workdir, prompts=ROWS, reward=score)


def test_a_config_of_the_package_is_taken_by_its_name(tmp_path):
    with pytest.raises(ValueError, match="no config of the package .*near: .*tiny"):
        run("tinny", tmp_path / "x", prompts=ROWS, reward=score)
    with pytest.raises(ValueError, match="field .question. or"):
        run("tiny", tmp_path / "y", prompts=[{"no": "prompt"}], reward=score)


def test_rows_that_a_run_cannot_go_on_with_leave_its_own(tmp_path):
    """A resume has no other copy of its prompts."""
    own = tmp_path / "prompts.jsonl"
    own.write_text("the rows of before\n")
    (tmp_path / "evals.jsonl").touch()
    with pytest.raises(ValueError, match="prompts: the run in .* other rows"):
        run(make_config(), tmp_path, prompts=ROWS, reward=score)
    assert own.read_text() == "the rows of before\n"
    with pytest.raises(ValueError, match=r"prompts\[1\] = .*int64.*JSON"):
        run("tiny", tmp_path / "x", prompts=[{}, {"prompt": "a", "reference": N}])
    with pytest.raises(
        ValueError, match=r"prompts\[0\] = '1 \+ 1' is of type str, .*row"
    ):
        run("tiny", tmp_path / "y", prompts=["1 + 1"])
