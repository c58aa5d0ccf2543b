"""The report of studies whose curves are written by a known law."""

import csv
import json

import numpy as np
import pytest

from scalerl_jax.study.design import Study
from scalerl_jax.study.report import describe, find, write_report

STUDY = Study(
    base="configs/tiny.py",
    arms={"low": {}, "high": {"objective.aggregation": "token"}},
    seeds=(0, 1, 2),
    steps=40,
)
SPREAD = (-0.01, 0.0, 0.01)  # of A between seeds


def write_runs(root, asymptotes, *, seeds=STUDY.seeds):
    """Sigmoids with B = 2 and C_mid = 1000, evaluated 40 times, with a little noise."""
    for arm, asymptote in asymptotes.items():
        for seed in seeds:
            folder = root / arm / f"seed{seed}"
            folder.mkdir(parents=True)
            noise = np.random.default_rng(seed).normal(0.0, 0.002, 41)
            rows = []
            for step in range(41):
                x = 200.0 * step
                share = 0.0 if step == 0 else 1.0 / (1.0 + (1000.0 / x) ** 2)
                rate = 0.2 + (asymptote + SPREAD[seed] - 0.2) * share + noise[step]
                rows.append(
                    {
                        "step": step,
                        "pass_rate": rate,
                        "generated_tokens": x,
                        "compute_chip_hours": x,
                    }
                )
            lines = [json.dumps(row) for row in rows]
            (folder / "evals.jsonl").write_text("\n".join(lines) + "\n")


def table(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_difference_beyond_the_spread_of_seeds_has_a_winner(tmp_path):
    write_runs(tmp_path, {"low": 0.6, "high": 0.7})
    files = write_report(
        STUDY, find(STUDY, tmp_path), tmp_path, tmp_path / "report", title="two arms"
    )
    assert {file.name for file in files} == {
        "curves.csv",
        "curves.png",
        "differences.csv",
        "linearised.png",
        "report.html",
        "runs.csv",
    }
    (pair,) = table(tmp_path / "report" / "differences.csv")
    assert (pair["a"], pair["b"], pair["winner"]) == ("low", "high", "high")
    # Runs of a seed share their luck, so pairs all differ by 0.1.
    assert float(pair["A"]) == pytest.approx(-0.1, abs=0.005)
    assert float(pair["A_low"]) > -0.12 and float(pair["A_high"]) < -0.08
    runs = table(tmp_path / "report" / "runs.csv")
    assert [float(run["A"]) for run in runs] == pytest.approx(
        [0.59, 0.69, 0.70, 0.60, 0.61, 0.71], abs=0.01
    )
    assert all(float(run["B"]) == pytest.approx(2.0, rel=0.1) for run in runs)
    assert all(abs(float(run["foretold_from_0.5_error"])) < 0.02 for run in runs)
    assert len(table(tmp_path / "report" / "curves.csv")) == 6 * 41
    page = (tmp_path / "report" / "report.html").read_text()
    assert "high is better" in page and "<script" not in page.split("</head>")[0]


def test_equal_arms_are_not_decided_and_a_missing_run_is_named(tmp_path):
    write_runs(tmp_path, {"low": 0.6, "high": 0.6}, seeds=(0, 1))
    findings = find(STUDY, tmp_path)
    assert [pair.winner for pair in findings.pairs] == [None]
    said = describe(STUDY, findings)
    assert "low/seed2: not begun" in said and "high/seed2: not begun" in said


def test_without_a_curve_there_is_no_report(tmp_path):
    with pytest.raises(ValueError, match="no run has enough evaluations"):
        find(STUDY, tmp_path)
