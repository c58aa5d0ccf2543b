"""What the report says of run directories: settings, versions, training, rollouts."""

import json
import os

import numpy as np
import pytest

from scalerl_jax.scaling import run_details, sigmoid, text
from scalerl_jax.scaling.plots_of_training import draw_training, means
from scalerl_jax.scaling.run_details import (
    differing,
    origins_sheet,
    read_details,
    settings_sheet,
)


def write_run(folder, *, seed, settings, steps=60, rollouts=()):
    """Files of a run: an evaluation every 10 steps, 100 tokens a step."""
    folder.mkdir()
    config = {"seed": seed, "compile_cache": "here", **settings}
    record = {"config": config, "seed": seed, "git_revision": f"abc{seed}"}
    record["versions"] = {"jax": "1.2.3", "python": "3.99.0"}
    (folder / "config.json").write_text(json.dumps(record))
    (folder / "ledger.json").write_text('{"chip": "TPU v9"}')
    x = np.arange(0, steps + 1, 10)
    rates = sigmoid(
        x, initial_reward=0.2, asymptote=0.8, exponent=2.0, midpoint=steps / 5
    )
    rows = {
        "evals.jsonl": [
            {"step": int(step), "generated_tokens": int(100 * step), "pass_rate": y}
            for step, y in zip(x, rates, strict=True)
        ],
        "metrics.jsonl": [
            {"step": n, "compute/generated_tokens": 100 * n, "reward/mean": n / steps}
            for n in range(1, steps + 1)
        ],
        "rollouts.jsonl": list(rollouts),
    }
    for name, lines in rows.items():
        (folder / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def rollout(step, number, status="correct", **fields):
    row = {"step": step, "task": "sums", "prompt": f"p{number}", "status": status}
    row |= {"completion": f"c{step}.{number}", "reference": "7", "tokens": 3}
    return row | fields


def test_settings_are_listed_where_runs_differ_and_runs_that_are_alike_together(
    tmp_path,
):
    made = {"prompt": {"seeds": [1, 2]}, "token": {"seeds": [1]}}
    details = {}
    for name, recipe in made.items():
        loss = {"aggregation": name, "clip": 0.2}
        settings = {"objective": loss} | ({"extra": None} if name == "token" else {})
        for seed in recipe["seeds"]:
            folder = write_run(tmp_path / f"{name}{seed}", seed=seed, settings=settings)
            details[folder.name] = read_details(folder, x_name="generated_tokens")
    assert differing(details) == {
        "objective.aggregation": ["prompt", "prompt", "token"]
    }
    sheet, left_out = settings_sheet(details)
    assert sheet[0] == ("setting", "prompt1, prompt2", "token1")
    assert sheet[1] == [("objective.aggregation", "prompt", "token")]
    assert left_out == 0
    header, rows = origins_sheet(details)
    row = dict(zip(header, rows[1], strict=True))
    assert row == {
        "run": "prompt2", "seed": "2", "revision": "abc2", "scalerl_jax": "-",
        "jax": "1.2.3", "jaxlib": "-", "python": "3.99.0", "chip": "TPU v9",
        "started": "-",
    }  # fmt: skip


def test_more_settings_than_fit_are_counted(tmp_path):
    details = {
        name: read_details(
            write_run(
                tmp_path / name,
                seed=0,
                settings={
                    f"s{i}": [name, i] for i in range(run_details.MOST_SETTINGS + 7)
                },
            ),
            x_name="step",
        )
        for name in "ab"
    }
    (_, rows), left_out = settings_sheet(details)
    assert len(rows) == 100 and left_out == 7
    assert rows[3] == ("s3", '["a", 3]', '["b", 3]')


def test_training_is_drawn_over_the_compute_of_the_fit(tmp_path):
    folder = write_run(tmp_path / "a", seed=0, settings={})
    for x_name, last in (("generated_tokens", 6000), ("step", 60)):
        details = read_details(folder, x_name=x_name)
        assert details.training["x"][-1] == last
        assert details.training["reward/mean"][29] == 0.5
        assert set(details.training) == {"step", "x", "reward/mean"}
    hours = read_details(folder, x_name="compute_chip_hours")
    assert "x" not in hours.training
    figure = draw_training(
        {"a": hours.training}, names=["a"], x_name="compute_chip_hours", first=0.01
    )
    (axes,) = figure.axes
    assert axes.get_xlabel() == "compute (optimizer steps)"
    assert axes.get_title(loc="left") == "reward"
    assert draw_training({"a": {}}, names=["a"], x_name="step", first=1.0) is None


def test_points_of_a_training_curve_are_means_of_parts_of_the_axis():
    x = np.array([0.5, 1.0, 2.0, np.nan, 3.0, 5.0, 6.0])
    y = np.array([9.0, 1.0, 3.0, 9.0, np.nan, 7.0, 8.0])
    found = means(x, y, np.array([1.0, 3.0, 4.0, 5.0]))
    np.testing.assert_array_equal(found, [[1.5, 5.0], [2.0, 7.0]])


def test_a_long_file_of_metrics_is_read_at_even_distances(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "a", seed=0, settings={}, steps=5000)
    monkeypatch.setattr(run_details, "MOST_ROWS", 100)
    details = read_details(folder, x_name="step")
    steps = details.training["step"]
    assert 90 <= len(steps) <= 102 and steps[0] == 1
    # A row is a 5000th of the file but for the digits of its step.
    assert np.diff(steps[:-1]).min() >= 40 and np.diff(steps).max() <= 70
    assert steps[-1] == 5000, "the newest row is not left out"
    np.testing.assert_array_equal(details.training["reward/mean"], steps / 5000)
    assert details.notes == (
        f"metrics.jsonl: {len(steps)} rows at even distances, 2 % of it",
    )


def test_right_and_wrong_rollouts_of_the_first_and_last_evaluation_are_kept(tmp_path):
    first = ["correct", "wrong", "correct", "correct", "no_answer", "wrong"]
    rows = [rollout(0, i, status) for i, status in enumerate(first)]
    rows += [rollout(10, 0), rollout(20, 0, cut_off=True), rollout(20, 1)]
    folder = write_run(tmp_path / "a", seed=0, settings={}, rollouts=rows)
    with (folder / "rollouts.jsonl").open("a") as file:
        file.write('{"step": 20, "prompt": "to')
    details = read_details(folder, x_name="step")
    assert [each.completion for each in details.rollouts] == [
        *("c0.0", "c0.1", "c0.2", "c0.4"),
        *("c20.0", "c20.1"),
    ]
    assert [each.ended for each in details.rollouts[-2:]] == ["cut off", ""]
    assert details.notes == ("rollouts.jsonl: rows left out that are no rollouts: 1",)


def test_ends_of_a_long_file_of_rollouts_are_read(tmp_path, monkeypatch):
    rows = [rollout(step, n) for step in range(0, 1000, 10) for n in range(3)]
    folder = write_run(tmp_path / "a", seed=0, settings={}, rollouts=rows)
    monkeypatch.setattr(run_details, "MOST_BYTES", 1000)
    details = read_details(folder, x_name="step")
    assert [each.step for each in details.rollouts] == [0, 0, 990, 990]
    assert not any("rollouts" in note for note in details.notes)


def test_a_text_is_cut_in_its_middle_and_says_by_how_much():
    assert text.cut("abcdef", 6) == "abcdef"
    assert text.cut("abcdefghi", 5) == "abc [... 4 more letters ...] hi"


@pytest.mark.parametrize(
    "value, plain, words",
    [
        (1_353_329, "1,353,000", "1.35 million generated tokens"),
        (69_340.4, "69,340", "69,340 generated tokens"),
        (4.8707e12, "4.871e+12", "4.87 trillion generated tokens"),
        (3e18, "3e+18", "3e+18 generated tokens"),
        (0.0090823, "0.009082", "0.009082 generated tokens"),
        (0.0, "0", "0 generated tokens"),
    ],
)
def test_compute_is_written_plainly(value, plain, words):
    assert text.number(value, text.AMOUNT) == plain
    assert text.in_words(value, "generated_tokens") == words


def break_files(folder):
    """Make every file of a run one that a careless reader stumbles over."""
    (folder / "metrics.jsonl").unlink()
    os.mkfifo(folder / "metrics.jsonl")
    (folder / "config.json").write_text("[" * 100_000)
    (folder / "ledger.json").unlink()
    (folder / "ledger.json").mkdir()
    rows = [
        b'{"step": 1}',
        b"\xff\xfe",
        b'{"step": 1e999}',
        b"[1]",
        b"null",
        b"{" * 999,
    ]
    (folder / "rollouts.jsonl").write_bytes(b"\n".join(rows))


def test_files_that_cannot_be_read_are_left_out_with_a_note(tmp_path):
    folder = write_run(tmp_path / "a", seed=0, settings={})
    break_files(folder)
    details = read_details(folder, x_name="step")
    assert not (details.settings or details.training or details.rollouts)
    assert details.notes == (
        f"config.json is left out: {folder}/config.json is not valid JSON: it nests "
        "deeper than 100",
        f"ledger.json is left out: {folder}/ledger.json is no regular file; write its "
        "content into one",
        f"metrics.jsonl is left out: {folder}/metrics.jsonl is no regular file; write "
        "its content into one",
        "rollouts.jsonl: rows left out that are no rollouts: 6",
    )
    (folder / "config.json").write_text(json.dumps({"config": "x" * 2**22}))
    (folder / "metrics.jsonl").unlink()
    rows = [{"step": 1, "entropy": 10**400}, {"step": True, "entropy": "1"}]
    rows += [{"step": 3, "entropy": 0.5}]
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (folder / "metrics.jsonl").write_text(lines + "NaN\n")
    details = read_details(folder, x_name="step")
    assert "config.json is larger than 4,194,304 bytes" in details.notes[0]
    assert "metrics.jsonl: rows left out that are no JSON objects: 1" in details.notes
    np.testing.assert_array_equal(details.training["entropy"], [np.nan, np.nan, 0.5])
