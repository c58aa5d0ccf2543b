"""The command line, from a file to its output."""

import json
import subprocess
import sys

import numpy as np
import pytest
import small_bucket

from scalerl_jax.formats.remote import send_back
from scalerl_jax.scaling import extrapolate_curve, fit_curve, load_curve, sigmoid
from scalerl_jax.scaling.__main__ import main
from scalerl_jax.scaling.plots import draw_extrapolation, draw_fits


@pytest.fixture
def run_dir(tmp_path):
    x = np.linspace(0.0, 0.1, 21)
    noise = np.random.default_rng(0).normal(0, 0.01, x.size)
    y = noise + sigmoid(
        x, initial_reward=0.3, asymptote=0.9, exponent=2.0, midpoint=0.02
    )
    rows = [
        {
            "step": 10 * i,
            "compute_chip_hours": x[i],
            "train_tokens": 1000 * i,
            "pass_rate": y[i],
            "pass_rate_se": 0.01,
        }
        for i in range(x.size)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "evals.jsonl").write_text(text)
    return tmp_path


def test_json_holds_the_promised_fields(run_dir, capsys):
    assert main(["fit", str(run_dir), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["x_name"] == "compute_chip_hours"
    assert record["n_points"] == 20
    assert record["identified"] is True and record["reason"] is None
    assert record["A_low"] < record["A"] < record["A_high"]
    assert record["B_low"] < record["B"] < record["B_high"]
    assert record["C_mid_low"] < record["C_mid"] < record["C_mid_high"]
    assert record["R0_source"] == "measured"
    assert 0.9 < record["r_squared"] < 1
    assert abs(record["r0_free"]["A"] - 0.9) < 0.1
    half = record["half_forecast"]
    assert half["fit_until"] == pytest.approx(0.05)
    assert half["error"] == pytest.approx(half["predicted"] - half["actual"])
    assert json.loads((run_dir / "fit.json").read_text()) == record


def test_a_run_directory_gets_its_picture(run_dir, capsys):
    assert main(["fit", str(run_dir)]) == 0
    assert (run_dir / "fit.png").read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    assert "fit.png" in text and "R^2" in text and "forecast" in text


def test_several_curves_of_a_run_are_all_in_its_file(run_dir, capsys):
    lines = (run_dir / "evals.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    rows = [row | {"hard": 0.5 * row["pass_rate"]} for row in rows]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run_dir / "evals.jsonl").write_text(text)
    assert main(["fit", str(run_dir), "--y=pass_rate,hard", "--json"]) == 0
    easy, hard = json.loads(capsys.readouterr().out)
    assert (easy["name"], hard["name"]) == ("pass_rate", "hard")
    assert json.loads((run_dir / "fit.json").read_text()) == [easy, hard]


def test_known_errors_are_drawn_although_points_count_alike(run_dir):
    result = fit_curve(load_curve(run_dir))
    assert np.all(result.problem.weights == 1.0)
    for figure in (
        draw_fits([result], ["a"]),
        draw_fits([result, result], ["a", "b"]),
        draw_extrapolation(extrapolate_curve(result.whole_curve)),
    ):
        assert all(axes.collections for axes in figure.axes)
        bars = [c for axes in figure.axes for c in axes.containers]
        assert bars and all(bar.has_yerr for bar in bars)


def test_a_file_gets_nothing_written_beside_it(run_dir, capsys):
    file = run_dir / "evals.jsonl"
    assert main(["fit", str(file), "--x", "train_tokens", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["x_name"] == "train_tokens"
    assert [path.name for path in run_dir.iterdir()] == ["evals.jsonl"]


@pytest.mark.parametrize(
    "last, says",
    [
        pytest.param(9, "not identified: A has no upper limit: A = 1", id="too early"),
        pytest.param(None, "without meaning: collapse: the curve falls", id="collapse"),
    ],
)
def test_an_unidentified_curve_is_written_and_drawn_as_such(
    run_dir, capsys, last, says
):
    file = run_dir / "evals.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    if last is None:
        for row in rows[12:]:
            row["pass_rate"] *= 0.3
    else:
        x = np.array([row["compute_chip_hours"] for row in rows])
        y = sigmoid(x, initial_reward=0.3, asymptote=0.9, exponent=2.0, midpoint=0.3)
        noise = np.random.default_rng(1).normal(0, 0.01, x.size)
        for row, rate in zip(rows, y + noise, strict=True):
            row["pass_rate"] = rate
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["fit", str(run_dir)]) == 0
    assert says in capsys.readouterr().out
    record = json.loads((run_dir / "fit.json").read_text())
    assert record["identified"] is False and record["A_high"] is None
    assert (run_dir / "fit.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "name, text, arguments, message",
    [
        pytest.param("none.csv", None, [], "no such file", id="missing file"),
        pytest.param("a.txt", "1,2", [], "unknown kind '.txt'", id="kind"),
        pytest.param("a.csv", "h,r\n", [], "no rows", id="empty"),
        pytest.param("a.csv", "h,r\n1,2\n", [], "choose --x from: h, r", id="column"),
        pytest.param(
            "a.csv", "h,r\n1,x\n", ["--x=h", "--y=r"], "a.csv:2: r = 'x'", id="text"
        ),
        pytest.param(
            "a.csv",
            "h,r\n1\n",
            ["--x=h", "--y=r"],
            "(of 1, h in 1, r in 0)",
            id="short",
        ),
        pytest.param(
            "a.jsonl", '{"h": 1}\n{"h": \n', [], "a.jsonl:2: not valid JSON", id="torn"
        ),
        pytest.param("a.jsonl", "[1]\n", [], "a.jsonl:1: holds list", id="no object"),
        pytest.param(
            "a.jsonl",
            '{"h": 1, "r": NaN}',
            ["--x=h", "--y=r"],
            "a.jsonl: no row has a number in h and r",
            id="nan",
        ),
        pytest.param(
            "a.csv", "h,r\n1,.2\n2,.3\n", ["--x=h", "--y=r"], "at least 5", id="few"
        ),
        *(
            pytest.param(
                "a.csv",
                f"h,r,r_se\n1,.2,.1\n2,.3,{error}\n",
                ["--x=h", "--y=r"],
                "a.csv:2: r_se holds standard errors that are negative, not finite, or",
                id=f"error {error}",
            )
            for error in ("-1", "1e300")
        ),
    ],
)
def test_bad_input_ends_with_one_message_and_status_2(
    tmp_path, capsys, name, text, arguments, message
):
    if text is not None:
        (tmp_path / name).write_text(text)
    assert main(["fit", str(tmp_path / name), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err and captured.err.count("\n") == 1


def test_fitting_needs_neither_jax_nor_matplotlib():
    code = (
        "import sys, scalerl_jax.scaling as s; s.fit([0,1,2,3,4,5],[.1,.2,.4,.5,.6,.6])"
        "; sys.exit(bool({'jax', 'matplotlib', 'scipy.stats', 'tokenizers', 'fsspec',"
        " 'etils'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """A bucket, and a home of its own for the copies of what is in it."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return small_bucket.empty()


@small_bucket.NEEDS_EXTRA
def test_a_run_in_a_bucket_is_fitted_there(run_dir, bucket, capsys):
    rows = (run_dir / "evals.jsonl").read_bytes()
    bucket.write("runs/x/evals.jsonl", rows)
    bucket.write("runs/x/checkpoints/step_00000002/state", b"large")
    assert main(["fit", str(run_dir), "--json"]) == 0
    here = json.loads(capsys.readouterr().out)
    assert main(["fit", "gs://bucket/runs/x/", "--json"]) == 0
    there = json.loads(capsys.readouterr().out)
    assert there.pop("name") == "x" and here.pop("name")
    assert there == here
    assert json.loads(bucket.objects["runs/x/fit.json"][0]) == {"name": "x", **here}
    assert bucket.objects["runs/x/fit.png"][0].startswith(b"\x89PNG")
    copies = [file for file in run_dir.glob("home/**/*") if file.is_file()]
    assert {file.name for file in copies} == {"evals.jsonl", "fit.json", "fit.png"}
    # A run of this machine has its own copy elsewhere, and nobody writes into that.
    assert not (run_dir / "home/.cache/scalerl_jax/buckets").exists()

    bucket.write("runs/x/evals.jsonl", rows[: rows.rindex(b"\n", 0, -1) + 1])
    assert main(["fit", "gs://bucket/runs/x", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["n_points"] == here["n_points"] - 1


@small_bucket.NEEDS_EXTRA
def test_other_commands_and_files_read_a_bucket_too(run_dir, bucket, capsys):
    bucket.write("runs/x/evals.jsonl", (run_dir / "evals.jsonl").read_bytes())
    curve = "".join(f"{x},{x / (x + 3)}\n" for x in range(12))
    bucket.write("curve.csv", f"hours,rate\n{curve}".encode())
    assert main(["watch", "gs://bucket/runs/x", "--once"]) == 0
    assert "x: 20 evaluations" in capsys.readouterr().out
    file = "gs://bucket/curve.csv"
    assert main(["fit", file, "--x", "hours", "--y", "rate"]) == 0
    assert not [name for name in bucket.names() if "fit" in name]  # of runs alone
    assert main(["fit", "gs://bucket/runs/y"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: gs://bucket/runs/y: there is nothing of this name")
    assert said.count("\n") == 1
    assert main(["fit", "s3://bucket/runs/y"]) == 2
    assert "write gs://BUCKET/PATH" in capsys.readouterr().err


@small_bucket.NEEDS_EXTRA
def test_who_may_not_write_into_the_bucket_has_the_fit_here(
    run_dir, bucket, monkeypatch
):
    monkeypatch.setenv("HOME", str(run_dir))
    file = run_dir / ".cache/scalerl_jax/looked_at/bucket/runs/x/fit.json"
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    assert send_back(file) == "gs://bucket/runs/x/fit.json"
    bucket.denied = True
    assert send_back(file) == str(file)
    assert send_back(run_dir / "fit.json") == str(run_dir / "fit.json")
