"""The report of studies whose curves are written by a known law."""

import csv
import dataclasses
import json
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from small_study import keep_record

from scalerl_jax.scaling import tables
from scalerl_jax.scaling.__main__ import main
from scalerl_jax.scaling.load import load_curves
from scalerl_jax.scaling.records import CurveError
from scalerl_jax.study import export as export_module
from scalerl_jax.study.__main__ import main as study_main
from scalerl_jax.study.design import Study
from scalerl_jax.study.export import export
from scalerl_jax.study.report import describe, differences_table, find, write_report

ROOT = Path(__file__).parents[2]
TINY_BASE = ROOT / "scalerl_jax" / "assets" / "tiny_base"
STUDY = Study(
    base="configs/tiny.py",
    arms={"low": {}, "high": {"objective.aggregation": "token"}},
    seeds=(0, 1, 2),
    steps=40,
)
EVALUATION = {
    "pass_rate": 0.588,
    "generated_tokens": 8000.0,
    "compute_chip_hours": 8000.0,
    "prompt_pass_rates": [0.0, 0.25, 1.0],
}
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
                        "prompt_pass_rates": [0.0, 0.25, 1.0],
                    }
                )
            lines = [json.dumps(row) for row in rows]
            (folder / "evals.jsonl").write_text("\n".join(lines) + "\n")
            ledger = {"chip": "tpu-v5e", "chip_s": {"train": 5.0}, "counts": {}}
            (folder / "ledger.json").write_text(json.dumps(ledger))


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
        "forecasts.csv",
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
    _, half = table(tmp_path / "report" / "forecasts.csv")
    assert (half["from"], half["runs"], half["of"]) == ("0.5", "6", "6")
    assert float(half["fit_error"]) < 0.01 and float(half["in_band"]) > 0.7
    # By hand: the last three seen are at 3,600 to 4,000 of C_mid = 1,000, the end at
    # 8,000: shares of 14/15 and 64/65, of A - 0.2 = 0.4 and 0.5 in the mean.
    assert float(half["last_value_error"]) == pytest.approx(0.023, abs=0.003)
    said = describe(STUDY, find(STUDY, tmp_path))
    assert "from 50 % of the compute, 6 of 6 runs: mean error 0.00" in said
    assert len(table(tmp_path / "report" / "curves.csv")) == 6 * 41
    page = (tmp_path / "report" / "report.html").read_text()
    assert "high is better" in page and "<script" not in page.split("</head>")[0]


def test_equal_arms_are_not_decided_and_a_missing_run_is_named(tmp_path):
    write_runs(tmp_path, {"low": 0.6, "high": 0.6}, seeds=(0, 1))
    findings = find(STUDY, tmp_path)
    assert [pair.winner for pair in findings.pairs] == [None]
    said = describe(STUDY, findings)
    assert "low/seed2: not begun" in said and "high/seed2: not begun" in said
    out = tmp_path / "report"
    out.mkdir()
    (out / "linearised.png").touch()  # of an earlier report
    one = dict([*findings.fits.items()][:1])
    alone = dataclasses.replace(findings, fits=one, pairs=())
    files = write_report(STUDY, alone, tmp_path, out, title="one run")
    assert sorted(out.iterdir()) == sorted(files)


def test_all_that_is_left_out_is_told_in_the_page_too(tmp_path):
    """A run that failed midway, a row without a rate, arms without a common seed."""
    study = dataclasses.replace(
        STUDY, arms=STUDY.arms | {"other": {"objective.aggregation": "sample"}}
    )
    write_runs(tmp_path, {"low": 0.6, "high": 0.7}, seeds=(0, 1))
    write_runs(tmp_path, {"other": 0.7}, seeds=(2,))
    file = tmp_path / "high/seed1/evals.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()[:31]]
    rows[5]["pass_rate"] = None
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "high/seed1/metrics.jsonl").write_text('{"step": 30}\n')
    failed = json.dumps({"why": "out of memory", "status": 1})
    (tmp_path / "high/seed1/failed.json").write_text(failed)
    findings = find(study, tmp_path)
    said = describe(study, findings)
    write_report(study, findings, tmp_path, tmp_path / "report", title="three")
    page = (tmp_path / "report" / "report.html").read_text()
    for told in (
        "high/seed1: fitted as far as it is: step 30 of 40; it failed: out of memory",
        "low/seed2: not begun",
        "low against other: not compared: no seed has a run of both",
        "all are compared by their fits up to 6,000",
    ):
        assert told in said and told in page
    (note,) = findings.notes
    assert note.endswith("evals.jsonl: 1 of 31 rows left out: no number in pass_rate")
    assert note in page
    (pair,) = table(tmp_path / "report" / "differences.csv")
    assert float(pair["compared_at"]) == 6000.0


@pytest.mark.slow
def test_no_seeds_decide_what_seeds_cannot(tmp_path):
    """An arm that does not climb: more of its seeds do not either."""
    write_runs(tmp_path, {"low": 0.2, "high": 0.6})
    findings = find(STUDY, tmp_path)
    said = describe(STUDY, findings)
    assert "low does not climb" in said and "would decide it" not in said
    flat, climbing = (line.split() for line in said.splitlines()[2:4])
    assert flat[:-1] == "low 3 not identified by 2 - -".split()
    assert climbing[2] == "0.600"
    assert differences_table(findings)[0]["seeds_to_decide"] is None


def test_without_a_curve_there_is_no_report(tmp_path):
    with pytest.raises(ValueError, match="no run has enough evaluations"):
        find(STUDY, tmp_path)


def test_an_exported_study_is_read_by_the_fitter_as_the_runs_are(tmp_path, capsys):
    write_runs(tmp_path, {"low": 0.6, "high": 0.7})
    with (tmp_path / "low/seed0/evals.jsonl").open("a") as file:  # a resumed run
        file.write(json.dumps(EVALUATION | {"step": 40}) + "\n")
    keep_record(STUDY, tmp_path)
    files = export(STUDY, tmp_path, tmp_path / "two", title="two")
    assert sum(file.stat().st_size for file in files) < 100_000
    of_runs = [fit.whole_curve for fit in find(STUDY, tmp_path).fits.values()]
    for name in ("two", "two/curves.csv"):
        read = {curve.name: curve for curve in load_curves(tmp_path / name)}
        assert set(read) == {f"{arm}, {s}" for arm in STUDY.arms for s in STUDY.seeds}
        for curve in of_runs:
            same = read[curve.name.replace("/seed", ", ")]
            np.testing.assert_array_equal(same.x, curve.x)
            np.testing.assert_allclose(same.y, curve.y, rtol=1e-12)
            assert same.x_name == "generated_tokens" and same.r0 == curve.r0
            if name == "two":  # CSV has no pass rates of single prompts
                np.testing.assert_array_equal(same.prompt_rates, curve.prompt_rates)
    assert main(["compare", str(tmp_path / "two"), "--paired"]) == 0
    assert "high is better: A is higher" in capsys.readouterr().out
    assert {row["train_chip_s"] for row in table(tmp_path / "two/runs.csv")} == {"5.0"}
    settings = json.loads((tmp_path / "two/settings.json").read_text())
    assert settings["arms"]["high"] == {"objective.aggregation": "token"}
    assert settings["arms"]["low"] == {"objective.aggregation": "prompt"}
    base = settings["settings"]["model.checkpoint"]  # of configs/tiny.py
    assert base == "scalerl_jax/assets/tiny_base"
    (tmp_path / "two/curves.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(CurveError, match="curves.parquet: no Parquet file"):
        load_curves(tmp_path / "two")
    card = (tmp_path / "two/README.md").read_text()
    assert "246 evaluations of 6 runs (6 finished)" in card
    assert "| `pass_rate_se` |" not in card and "| `pass_rate` |" in card


@pytest.mark.parametrize(
    ("axis", "seeds", "flags"),
    [
        pytest.param("generated_tokens", (0, 1), " --paired", id="usual"),
        pytest.param(
            "compute_chip_hours", (0, 1), " --paired --x compute_chip_hours", id="axis"
        ),
        pytest.param("generated_tokens", (0, 1, 2), "", id="unequal seeds"),
    ],
)
def test_the_commands_of_a_card_work(tmp_path, capsys, axis, seeds, flags):
    study = dataclasses.replace(STUDY, axis=axis)
    write_runs(tmp_path, {"low": 0.6}, seeds=(0, 1))
    write_runs(tmp_path, {"high": 0.7}, seeds=seeds)
    keep_record(study, tmp_path)
    export(study, tmp_path, tmp_path / "two", title="two")
    card = (tmp_path / "two/README.md").read_text()
    fit, compare = [n for n in card.splitlines() if n.startswith("scalerl ")]
    assert compare == f"scalerl compare studies/two{flags}"
    assert axis in fit
    words = compare.replace("studies/two", str(tmp_path / "two")).split()
    assert main(words[1:]) == 0
    if not flags:  # with --paired it is of the seeds that both arms have
        capsys.readouterr()
        assert main([*words[1:], "--paired"]) == 0
        said = capsys.readouterr().out
        assert "2 and 2 runs, paired by seed" in said and "left out: high, 2" in said


def test_runs_that_the_study_does_not_name_are_told(tmp_path, capsys):
    write_runs(tmp_path / "runs", {"low": 0.6, "high": 0.7})
    keep_record(STUDY, tmp_path / "runs")
    for seeds in ((0, 1), (0, 1, 2)):  # two seeds are fewer than there are on disk
        file = tmp_path / "two.py"
        file.write_text(
            "from scalerl_jax.study.design import Study\n"
            "def get_study():\n"
            f"    return Study(base={STUDY.base!r}, arms={STUDY.arms!r}, "
            f"seeds={seeds}, steps={STUDY.steps})\n"
        )
        flags = [str(file), f"--root={tmp_path / 'runs'}", f"--out={tmp_path / 'out'}"]
        assert study_main(["export", *flags]) == 0
        assert len(table(tmp_path / "out/runs.csv")) == 2 * len(seeds)
        said = capsys.readouterr().err
        told = "2 of 6 runs are left out, whose arm or seed the study does not name: "
        assert (f"{told}high/seed2, low/seed2" in said) == (len(seeds) == 2)
        assert ("left out" in said) == (len(seeds) == 2)


def test_an_exported_sweep_has_the_columns_that_its_laws_read(tmp_path, capsys):
    """Over completions per prompt (IsoCompute), and over model sizes (Tan et al.)."""
    models = {}
    for hidden in (64, 96):
        models[hidden] = tmp_path / str(hidden)
        shutil.copytree(TINY_BASE, models[hidden])
        file = models[hidden] / "config.json"
        settings = json.loads(file.read_text()) | {"hidden_size": hidden}
        file.write_text(json.dumps(settings))
    arms = {
        "n4": {"batch.group_size": 4, "model.checkpoint": str(models[64])},
        "n16": {"batch.group_size": 16, "model.checkpoint": str(models[96])},
    }
    study = dataclasses.replace(STUDY, arms=arms, seeds=(0,))
    write_runs(tmp_path, {"n4": 0.6, "n16": 0.7}, seeds=(0,))
    keep_record(study, tmp_path)
    export(study, tmp_path, tmp_path / "two", title="two")
    rows = table(tmp_path / "two/curves.csv")
    columns = "rollouts_per_prompt", "model_size"
    found = {row["arm"]: tuple(row[name] for name in columns) for row in rows}
    # By hand: embedding; per layer attention, feed-forward and norms; the last norm.
    sizes = {
        hidden: 72 * hidden
        + 4 * (hidden * 32 * (2 * 4 + 2 * 2) + 3 * hidden * 384 + 2 * hidden + 2 * 32)
        + hidden
        for hidden in models
    }
    assert found == {"n4": ("4", str(sizes[64])), "n16": ("16", str(sizes[96]))}
    sweep = ["--rollouts-per-prompt=rollouts_per_prompt", "--budget=2000"]
    sweep += ["--prompts-per-step=prompts_per_step"]
    said = []
    for x in ([], ["--x=step"]):  # steps by default, not the tokens of other commands
        assert main(["plan", str(tmp_path / "two"), *sweep, *x]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and "n tested: 4, 16" in said[0]
    assert main(["plan", str(tmp_path / "two"), *sweep, "--x=generated_tokens"]) == 2
    assert "does not count rollouts" in capsys.readouterr().err
    flags = ["--x=generated_tokens", "--model-size=model_size"]
    assert main(["fit", str(tmp_path / "two"), *flags]) == 0
    assert "2 model sizes" in capsys.readouterr().out


@pytest.mark.slow
def test_a_picture_and_the_tables_of_a_report_stand_beside_its_data(
    tmp_path, monkeypatch
):
    write_runs(tmp_path, {"low": 0.6, "high": 0.7})
    keep_record(STUDY, tmp_path)
    script = str(ROOT / "benchmarks" / "studies.py")
    flags = ["two", f"--root={tmp_path}", f"--out={tmp_path / 'two'}"]
    monkeypatch.setattr(sys, "argv", [script, *flags])
    with pytest.raises(SystemExit):  # there is no report yet
        runpy.run_path(script, run_name="__main__")
    findings, report = find(STUDY, tmp_path), tmp_path / "report"
    write_report(STUDY, findings, tmp_path, report, title="two")
    runpy.run_path(script, run_name="__main__")
    assert table(tmp_path / "two/fits.csv") == table(report / "runs.csv")
    assert table(tmp_path / "two/differences.csv") == table(report / "differences.csv")
    assert (tmp_path / "two/curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_value_that_every_row_repeats_counts_in_each_of_them(tmp_path, monkeypatch):
    file = tmp_path / "curves.parquet"
    column = pyarrow.array(["a" * 10_000] * 500).dictionary_encode()
    pyarrow.parquet.write_table(pyarrow.table({"step": column}), file)
    assert file.stat().st_size < 20_000
    monkeypatch.setattr(tables, "MOST_WHOLE", 2**20)
    with pytest.raises(CurveError, match="more than 1,048,576 bytes of values"):
        load_curves(file)
    monkeypatch.setattr(tables, "_MOST_PARQUET_ROWS", 499)
    with pytest.raises(CurveError, match="500 rows, and 499 are the most"):
        load_curves(file)


def test_what_is_too_large_is_not_exported(tmp_path, monkeypatch):
    write_runs(tmp_path, {"low": 0.6})
    keep_record(STUDY, tmp_path)
    monkeypatch.setattr(export_module, "MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="and 0 are the most"):
        export(STUDY, tmp_path, tmp_path / "two", title="two")
    assert not (tmp_path / "two").exists()
