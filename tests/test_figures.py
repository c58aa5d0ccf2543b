"""Figures that stand in several texts are those of one file."""

import json
import re
import runpy

import numpy as np
import pytest
import small_run
from scipy import stats

SEEDS = runpy.run_path(str(small_run.ROOT / "benchmarks" / "seeds.py"))
PLACES = [
    place
    for name in SEEDS["COMMANDS"]
    if SEEDS["kept"](name).is_file()
    for place in SEEDS["places"](name)
]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[0].name)
def test_a_text_says_the_figures_of_a_file(place):
    path, pattern, text = place
    found = re.findall(pattern, path.read_text(), flags=re.DOTALL)
    assert found == [text], "run: python benchmarks/seeds.py NAME"


def test_the_figures_are_those_of_the_runs(tmp_path):
    """The curve is exact: A = 0.9, B = 2, C_mid = 0.005 from a pass rate of 0.25."""
    config = {"seed": 7, "versions": {"jax": "1.2.3"}}
    config["config"] = {"train": {"num_steps": 300}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    compute = np.linspace(0.0, 0.02, 31)
    with np.errstate(divide="ignore"):
        rates = 0.25 + 0.65 / (1.0 + (0.005 / compute) ** 2)
    with (tmp_path / "evals.jsonl").open("w") as file:
        for step, (x, y) in enumerate(zip(compute, rates, strict=True)):
            row = {"step": 10 * step, "compute_chip_hours": x, "pass_rate": y}
            row["generated_tokens"] = round(1e8 * x)
            file.write(json.dumps(row) + "\n")
    steps = [{"step": step, "time/step_s": 0.6} for step in range(1, 301)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)))
    figures = SEEDS["read"]("tiny", [tmp_path])
    table, sentence = SEEDS["table"](figures), SEEDS["sentence"](figures)
    last = f"{rates[-1]:.3f}"
    line = rf"\| 7 \| 0.250 \| {last} \| 0.900 \[0.900, 0.900\] \| 2.00 \| 500,000 "
    line += (
        rf"\| 1.000 \| {last} \([+-]0\.000\) \| \[[\d., ]+\], (in|out)side \| sigmoid"
    )
    assert re.search(line, table)
    assert re.search(r"lay in the band in [01] of 1 runs", table)
    assert "JAX 1.2.3" in table
    assert f"{last} after 300 steps, in at most 3 minutes" in " ".join(sentence.split())


def test_who_is_ahead_halfway_is_a_paired_test_where_there_are_two_arms():
    """For two arms of equal seeds, shifts of the seeds make it the paired t test."""
    halfway = runpy.run_path(str(small_run.ROOT / "benchmarks" / "studies.py"))[
        "halfway"
    ]
    rates = {"a": (0.50, 0.62, 0.55), "b": (0.58, 0.69, 0.66)}
    runs = {
        arm: {
            str(seed): [(0.0, 0.2), (8.0, y), (16.0, 0.7)] for seed, y in enumerate(ys)
        }
        for arm, ys in rates.items()
    }
    paired = stats.ttest_rel(rates["b"], rates["a"]).confidence_interval(0.9)
    ends = f"[{paired.low:+.3f}, {paired.high:+.3f}], 3 seeds"
    assert halfway(runs, "x").splitlines() == ["at x = 8:", f"b - a: +0.087 {ends}"]
