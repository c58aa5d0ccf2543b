"""Commands over several runs: what they print, write and refuse."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from parsed_page import Parsed

from scalerl_jax.run.record import with_own_assets
from scalerl_jax.scaling import CurveError, fit_curve, load_curves, report, sigmoid
from scalerl_jax.scaling.__main__ import main

X = np.linspace(0.0, 16000.0, 25)
DATA_PARTS = ("training", "evaluation")  # of data.json
RECIPES = {"best": (0.61, 1.9), "slow": (0.60, 1.3), "low": (0.52, 1.9)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One CSV of three recipes that differ as the paper's do, with noise of 0.004."""
    generator = np.random.default_rng(7)
    lines = ["recipe,gpu_hours,pass_rate"]
    for name, (asymptote, exponent) in RECIPES.items():
        y = sigmoid(
            X,
            initial_reward=0.25,
            asymptote=asymptote,
            exponent=exponent,
            midpoint=2500.0,
        ) + generator.normal(0.0, 0.004, X.size)
        lines += [f"{name},{a},{b}" for a, b in zip(X, y, strict=True)]
    file = tmp_path_factory.mktemp("runs") / "recipes.csv"
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture
def short_reports(monkeypatch):
    """Pages without the extrapolation test of each run, which is ten fits."""
    monkeypatch.setattr(report, "MOST_IN_DETAIL", 1)


def run(command, file, *arguments):
    flags = ["--x=gpu_hours", "--group=recipe", *arguments]
    return main([command, str(file), *flags])


def test_recipes_are_ranked_as_they_were_made(runs, capsys, tmp_path):
    picture = tmp_path / "lines.png"
    flags = [f"--out={picture}"]
    assert run("compare", runs, "--json", *flags) == 0
    record = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in record["runs"]["rows"]] == ["best", "slow", "low"]
    assert len(record["pairs"]) == 3
    assert {pair["winner"] for pair in record["pairs"]} == {None}
    for name in ("lines.png", "lines-lines.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert run("compare", runs, *flags) == 0
    said = capsys.readouterr().out
    assert "over gpu_hours, ranked by A" in said
    assert "best against low: one run each: not decided" in said
    assert "the paper's rule, which ignores noise" in said


def small_run(folder, *, num_steps, evaluations):
    """Files of a run on a CPU: an evaluation every 10 steps and 0.001 chip-hours."""
    settings = {"eval": {"every": 10}, "train": {"num_steps": num_steps}}
    (folder / "config.json").write_text(json.dumps({"config": settings}))
    (folder / "ledger.json").write_text('{"chip": "cpu"}')
    evals = [
        {"step": 10 * n, "compute_chip_hours": 0.001 * n, "pass_rate": 0.2 + 0.1 * n}
        for n in range(evaluations + 1)
    ]
    steps = [{"step": n + 1, "time/step_s": 1.5} for n in range(10 * evaluations)]
    for name, rows in (("evals.jsonl", evals), ("metrics.jsonl", steps)):
        (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(folder)


@pytest.mark.parametrize("num_steps", [300, 20])
def test_too_few_evaluations_say_how_many_more_and_by_when(tmp_path, capsys, num_steps):
    run = small_run(tmp_path, num_steps=num_steps, evaluations=2)
    assert main(["fit", run]) == 2
    said = capsys.readouterr().err
    assert "2 evaluations more, by about compute_chip_hours = 0.004 " in said
    assert f"step 40 of {num_steps}, 0.5 more minutes at 1.5 s a step" in said
    assert ("go on with --config.train.num_steps=40" in said) == (num_steps == 20)
    (tmp_path / "config.json").write_text('{"config": {}}')
    assert main(["fit", run]) == 2
    assert capsys.readouterr().err.endswith("or evaluate more often\n")


def test_chip_hours_of_a_cpu_are_said_to_be_wall_time(tmp_path, capsys):
    run = small_run(tmp_path, num_steps=300, evaluations=6)
    assert main(["fit", run]) == 0
    assert "chip-hours of a CPU are its wall time" in capsys.readouterr().out
    assert main(["fit", run, "--x=step"]) == 0
    assert "wall time" not in capsys.readouterr().out


def test_each_run_of_a_table_has_its_own_chip(tmp_path, capsys):
    """Arms on machines of their own, in one table: the first row's is not all's."""
    rows = [{"arm": n, "seed": s} for n in ("pod", "laptop") for s in (0, 1, 2)]
    generator, lines = np.random.default_rng(0), []
    for row in rows:
        row["chip"] = "cpu" if row["arm"] == "laptop" else "TPU v5p"
        plateau = (0.7 if row["arm"] == "laptop" else 0.5) + 0.005 * row["seed"]
        for hours in np.arange(1.0, 31.0):
            rate = 0.2 + (plateau - 0.2) / (1.0 + (6.0 / hours) ** 2)
            rate += generator.normal(0.0, 0.004)
            lines.append(row | {"compute_chip_hours": hours, "pass_rate": rate})
    file = tmp_path / "arms.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--x=compute_chip_hours", "--group=arm,seed", "--x-name=hours"]
    assert main(["compare", str(file), *flags]) == 0
    said = capsys.readouterr().out
    assert "pod against laptop: not decided: chip-hours of a CPU are wall" in said
    file.write_text(file.read_text().replace('"cpu"', '"NVIDIA H100"'))
    assert main(["compare", str(file), *flags]) == 0
    said = capsys.readouterr().out
    assert "laptop is better: A is higher" in said
    assert "the hours are of different chips, NVIDIA H100 and TPU v5p" in said


def test_rewards_in_training_and_in_evaluations_are_not_compared(tmp_path, capsys):
    """A trainer that was not evaluated logs the rewards of its training only."""
    generator, files = np.random.default_rng(0), []
    for name, column, plateau in (("a", "eval_reward", 0.5), ("b", "reward", 0.7)):
        for seed in (0, 1):
            log = []
            for step in range(20, 1001, 20):
                rate = 0.2 + (plateau + 0.01 * seed - 0.2) / (1.0 + (200 / step) ** 2)
                log.append({"step": step, column: rate + generator.normal(0.0, 0.004)})
            files.append(tmp_path / f"{name}{seed}")
            files[-1].mkdir()
            state = files[-1] / "trainer_state.json"
            state.write_text(json.dumps({"log_history": log}))
    a, b = map(str, files[:2]), map(str, files[2:])
    assert main(["compare", *a, "--vs", *b, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    (pair,) = record["pairs"]
    assert pair["winner"] is None and pair["paper_rule"]["winner"] is None
    assert pair["reason"] == (
        "not decided: y is eval_reward in one run and reward in another; columns that "
        "measure the same need one name"
    )
    assert "runs of different y are ranked: eval_reward and reward" in str(
        record["runs"]["warnings"]
    )


def test_the_law_that_made_the_curve_foretells_it_best(runs, capsys, tmp_path):
    pictures = [tmp_path / "ex.svg", tmp_path / "ex-2.svg"]
    flags = ["--where=recipe=best", f"--out={pictures[0]}"]
    assert run("extrapolate", runs, *flags, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["best_law"] == "sigmoid" and record["beats_last_value"]
    assert pictures[0].read_bytes().startswith(b"<?xml")
    assert run("extrapolate", runs, *flags[:1], "--fractions", "0.5") == 0
    assert "least mean |error|" in capsys.readouterr().out


def test_a_plan_names_its_unit_and_says_never(runs, capsys):
    targets = ["--target=0.5", "--target=0.9", "--price=2", "--point-value=100"]
    assert run("plan", runs, "--where=recipe=best", *targets) == 0
    said = capsys.readouterr().out
    assert "gpu_hours to reach 0.9" in said and "never" in said
    # R = 0.5 at C_mid * ((0.5 - 0.25) / (0.61 - 0.5))^(1 / 1.9) = 3852 GPU-hours.
    assert run("plan", runs, "--where=recipe=best", *targets, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["targets"][0]["compute"]["value"] == pytest.approx(3852, rel=0.02)
    assert record["stop_below"] == pytest.approx(0.01 * 2 / 100)


def test_a_budget_is_split_by_the_sweep_that_wins_there(tmp_path, capsys):
    """More rollouts per prompt climb later and higher; a step costs 32 * n."""
    lines = ["run,n,prompts,step,pass_rate"]
    for n in (8, 128):
        for step in range(0, 200, 10):
            rate = sigmoid(
                32 * n * step,
                initial_reward=0.2,
                asymptote=0.5 + 0.001 * n,
                exponent=1.5,
                midpoint=1000.0 * n,
            )
            lines.append(f"n{n},{n},32,{step},{rate}")
    file = tmp_path / "sweep.csv"
    file.write_text("\n".join(lines))
    flags = ["--x=step", "--group=run", "--budget=1e4", "--budget=7e5"]
    assert main(["plan", str(file), *flags]) == 2
    assert "--rollouts-per-prompt" in capsys.readouterr().err
    flags += ["--rollouts-per-prompt=n", "--prompts-per-step=prompts"]
    assert main(["plan", str(file), *flags, "--json"]) == 0
    small, large = json.loads(capsys.readouterr().out)["allocations"]
    assert small["rollouts_per_prompt"] == 8 and small["steps"] == 39  # 1e4 / (8 * 32)
    assert large["rollouts_per_prompt"] == 128
    assert large["steps"] == 170  # 7e5 / (128 * 32)
    assert main(["plan", str(file), *flags, "--x-name=steps"]) == 0
    said = capsys.readouterr().out
    assert "700000 rollouts, where not every n has a run: n = 128" in said


def test_a_setting_that_changes_within_a_run_is_refused(tmp_path, capsys):
    file = tmp_path / "changing.csv"
    file.write_text("x,pass_rate,size\n1,0.2,7\n2,0.3,8\n")
    assert main(["fit", str(file), "--x=x", "--model-size=size"]) == 2
    assert "size is 7, 8 in one run" in capsys.readouterr().err


def test_seeds_are_pooled_and_other_tables_shown(runs, capsys):
    assert run("fit", runs, "--pool", "--sensitivity", "--bootstrap=20") == 0
    said = capsys.readouterr().out
    assert "3 seeds of one recipe, pooled" in said
    assert said.count("fitted from gpu_hours") == 3
    assert said.count("moving blocks, 20 refits") == 3
    assert run("fit", runs, "--pool", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    values = record["pooled"]["parameters"]["A"]["values"]
    np.testing.assert_allclose(values, [0.61, 0.60, 0.52], atol=0.015)
    assert run("extrapolate", runs, "--pool", "--fractions", "0.5") == 0
    assert "3 seeds of one recipe, pooled" in capsys.readouterr().out
    assert run("extrapolate", runs, "--pool", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert len(record["seeds"]) == record["pooled"]["num_seeds"] == 3


@pytest.mark.parametrize("command", ["fit", "extrapolate"])
def test_seeds_are_pooled_by_the_recipe_that_their_file_names(
    command, tmp_path, capsys
):
    table, x = tmp_path / "study.csv", np.arange(0.0, 13.0)
    generator, rows = np.random.default_rng(0), ["recipe,seed,tokens,pass_rate"]
    for recipe, asymptote in (("low", 0.5), ("high", 0.7)):
        for seed in range(2):
            y = 0.2 + (asymptote - 0.2) / (1 + (3.0 / np.maximum(x, 1e-9)) ** 2)
            y += generator.normal(0.0, 0.004, x.size)
            pairs = zip(x, y, strict=True)
            rows += [f"{recipe},{seed},{a},{b}" for a, b in pairs]
    table.write_text("\n".join(rows))
    flags = [str(table), "--x=tokens", "--group=recipe,seed", "--pool"]
    assert main([command, *flags]) == 0
    said = capsys.readouterr().out
    assert "low: 2 seeds of one recipe, pooled" in said
    assert "high: 2 seeds of one recipe, pooled" in said
    assert main([command, *flags, "--json"]) == 0
    assert sorted(json.loads(capsys.readouterr().out)["pooled"]) == ["high", "low"]


def test_the_report_is_one_page_that_fetches_nothing(runs, tmp_path):
    page, two = tmp_path / "report.html", tmp_path / "two.csv"
    lines = [line for line in runs.read_text().splitlines() if "slow" not in line]
    two.write_text("\n".join(lines))
    assert run("report", two, f"--out={page}", "--title=A < B & C") == 0
    text = page.read_text()
    parsed = Parsed(text)
    assert parsed.open == [] and parsed.fetched == []
    # Both runs, the linearised ones; per run its curve and its extrapolation test.
    assert parsed.images == 2 + 2 * 2
    data = json.loads(parsed.scripts["fits"])
    assert list(data) == ["best", "low"]
    assert data["best"]["A"] == pytest.approx(0.61, abs=0.015)
    assert "A &lt; B &amp; C" in text
    assert "gpu_hours" in text and "Method" in text
    assert "Settings" not in text and "Rollouts" not in text  # a table is of any runs


def test_many_runs_are_folded_and_tested_less(runs, monkeypatch):
    monkeypatch.setattr(report, "MOST_IN_DETAIL", 1)
    fits = {
        curve.name: fit_curve(curve)
        for curve in load_curves(runs, x="gpu_hours", group="recipe")
        if curve.name != "slow"
    }
    text = report.make_report(fits, title="many")
    parsed = Parsed(text)
    assert parsed.open == [] and parsed.images == 2 + 2
    assert "are left out" in text


@pytest.mark.usefixtures("short_reports")
def test_the_report_gives_no_difference_of_a_plateau_that_is_not_identified(runs):
    best, *_ = load_curves(runs, x="gpu_hours", group="recipe")
    climb = sigmoid(
        best.x, initial_reward=0.25, asymptote=0.9, exponent=1.2, midpoint=60_000.0
    )
    noise = np.random.default_rng(1).normal(0.0, 0.004, best.x.size)
    early = dataclasses.replace(best, y=climb + noise)
    fits = {"best": fit_curve(best), "early": fit_curve(early)}
    assert not fits["early"].identified
    text = report.make_report(fits, title="two")
    assert re.search(r"best - early</td><td>-</td><td>\S+ \[", text)


def test_runs_of_one_name_get_names_of_their_own(runs, capsys):
    assert main(["fit", str(runs), str(runs), "--x=gpu_hours", "--group=recipe",
                 "--where=recipe=best", "--json"]) == 0  # fmt: skip
    names = [row["name"] for row in json.loads(capsys.readouterr().out)]
    assert len(set(names)) == 2 and all("/best" in name for name in names)


@pytest.mark.parametrize(
    "command, arguments, message",
    [
        pytest.param("compare", ["--where=recipe=low"], "two recipes", id="one run"),
        pytest.param("fit", ["--out=a.pdf"], "that ends in .png or .svg", id="picture"),
        pytest.param("report", ["--out=a.pdf"], "that ends in .html", id="page"),
        pytest.param("fit", ["--out=no/a.png"], "there is no directory no", id="out"),
        pytest.param("fit", ["--group=run"], "choose --group from: recipe", id="group"),
        pytest.param("fit", ["--weighted"], "best: no standard errors", id="weights"),
        pytest.param("fit", ["--se=n"], "choose --se from", id="errors"),
        pytest.param("plan", ["--target=61"], "outside (0, 1)", id="target"),
        pytest.param("fit", ["--from=1e9"], "best: --from 1e+09 leaves", id="from"),
        pytest.param("fit", ["--r0=25"], "--r0 = 25 is outside", id="r0"),
        pytest.param(
            "fit", ["--map-rewards", "1", "-1"], "--map-rewards 1 -1", id="range"
        ),
    ],
)
def test_bad_requests_end_with_one_message_and_status_2(
    runs, capsys, command, arguments, message
):
    assert run(command, runs, *arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    "command", ["fit", "compare", "extrapolate", "plan", "watch", "report"]
)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert "--map-rewards LOW HIGH" in said and "TensorBoard" in said


def test_a_wrong_flag_ends_with_status_2(runs):
    done = subprocess.run(
        [sys.executable, "-m", "scalerl_jax.scaling", "fit", runs, "--where=recipe"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "give COLUMN=VALUE" in done.stderr


@pytest.mark.parametrize(
    "command, flag, message",
    [
        ("fit", "--level=90", "a share in (0, 1)"),
        ("fit", "--bootstrap=-5", "a whole number of at least 1"),
        ("fit", "--x-scale=0", "a number above 0"),
        ("compare", "--run-sd=-1", "a number of at least 0"),
        ("compare", "--margin=-1", "a number of at least 0"),
        ("plan", "--flops=nan", "a number above 0"),
        ("plan", "--price=free", "a number above 0"),
        ("watch", "--patience=0", "a whole number of at least 1"),
    ],
)
def test_a_number_out_of_its_limits_ends_with_one_line(
    runs, capsys, command, flag, message
):
    with pytest.raises(SystemExit) as end:
        main([command, str(runs), flag])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert message in said and flag.split("=")[0] in said and said.count("\n") == 1


def write_run(folder, *, seed, rates, chip="cpu", aggregation="prompt", **sections):
    """Files of a finished run: chip-hours and tokens of evaluations at steps."""
    folder.mkdir()
    objective = {"objective": {"aggregation": aggregation}, "seed": seed, **sections}
    (folder / "config.json").write_text(json.dumps({"config": objective}))
    (folder / "ledger.json").write_text(json.dumps({"chip": chip}))
    rows = [
        {
            "step": step,
            "compute_chip_hours": 0.001 * step * (1 + seed),
            "generated_tokens": 1000 * step,
            "pass_rate": rate,
        }
        for step, rate in enumerate(rates)
    ]
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (folder / "evals.jsonl").write_text(text)
    return str(folder)


def seeds_of_a_run(folder, name, *, asymptote, first=0, **settings):
    """Three runs that differ in their seeds, and in A by up to 0.01."""
    x = np.arange(25.0)
    return [
        write_run(
            folder / f"{name}-seed{seed}",
            seed=seed,
            rates=sigmoid(
                x,
                initial_reward=0.2,
                asymptote=asymptote + 0.005 * (seed - first - 1),
                exponent=2.0,
                midpoint=5.0,
            ).tolist(),
            **settings,
        )
        for seed in range(first, first + 3)
    ]


@pytest.mark.usefixtures("short_reports")
def test_runs_that_differ_in_their_seeds_are_one_recipe(tmp_path, capsys):
    """One was made before a setting existed, and one in another checkout."""
    base = "/elsewhere/scalerl_jax/assets/tiny_base"
    model = {"model": {"checkpoint": base}}
    ours = seeds_of_a_run(tmp_path, "prompt", asymptote=0.8, **model)
    newer = Path(ours[0]) / "config.json"
    record = json.loads(newer.read_text())
    record["config"]["batch"] = {"short_rows": False}
    record["config"]["model"]["checkpoint"] = with_own_assets(base)
    newer.write_text(json.dumps(record))
    others = seeds_of_a_run(
        tmp_path, "token", asymptote=0.7, aggregation="token", chip="TPU v5p", **model
    )
    assert main(["compare", *ours, *others, "--json", "--x=generated_tokens"]) == 0
    (pair,) = json.loads(capsys.readouterr().out)["pairs"]
    assert pair["names"] == ["prompt", "token"] and pair["num_runs"] == [3, 3]
    assert pair["winner"] == "prompt" and pair["paired_by"] is None
    flags = ["--paired", "--json", "--x=generated_tokens"]
    assert main(["compare", *ours, *others[1:], *flags]) == 0
    (pair,) = json.loads(capsys.readouterr().out)["pairs"]
    assert pair["paired_by"] == "seed" and pair["num_runs"] == [2, 2]
    assert pair["warnings"][0].endswith("are left out: prompt-seed0")
    page = tmp_path / "page.html"
    flags = ["--x=generated_tokens", f"--out={page}"]
    assert main(["report", *ours, *others, *flags]) == 0
    row = r"<td[^>]*>prompt - token</td>.*<td[^>]*>prompt</td><td[^>]*>prompt</td>"
    assert re.search(row, page.read_text())
    capsys.readouterr()
    assert main(["compare", *ours]) == 2
    assert "found runs of one" in capsys.readouterr().err
    assert main(["compare", ours[0], "--vs", *ours[1:], "--json"]) == 0
    (pair,) = json.loads(capsys.readouterr().out)["pairs"]
    assert pair["num_runs"] == [1, 2] and pair["winner"] is None
    assert not pair["warnings"]
    flags = ["--vs", *others[1:], "--json", "--x=generated_tokens"]
    assert main(["compare", *ours[1:], others[0], *flags]) == 0
    (pair,) = json.loads(capsys.readouterr().out)["pairs"]
    (warning,) = pair["warnings"]
    assert warning.startswith(f"runs of {pair['names'][0]} are of 2 recipes, by their")


@pytest.mark.parametrize(
    ("evaluated", "trained", "differs"),
    [
        pytest.param({"sets": ["b"]}, "a", "eval.sets = ['a'] and ['b']", id="sets"),
        pytest.param({}, "a", "eval.sets = ['a'] and []", id="held out"),
        pytest.param({"sets": ["a"]}, "b", None, id="only trained on others"),
    ],
)
def test_recipes_that_are_asked_other_prompts_get_no_winner(
    tmp_path, capsys, evaluated, trained, differs
):
    common = {"num_prompts": 9, "temperature": 1.0, "sets": []}
    ours = seeds_of_a_run(
        *(tmp_path, "prompt"),
        asymptote=0.8,
        chip="TPU v5e",
        eval=common | {"sets": ["a"]},
        data={"tasks": ["a"]},
    )
    others = seeds_of_a_run(
        *(tmp_path, "token"),
        asymptote=0.7,
        chip="TPU v5p",
        eval=common | evaluated | {"temperature": 0.6},
        data={"tasks": [trained]},
    )
    flags = ["--json", "--x=compute_chip_hours"]
    assert main(["compare", *ours, *others, *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    (pair,) = found["pairs"]
    assert pair["winner"] == (None if differs else "prompt")
    for said in ("eval.temperature = 1.0 and 0.6", "chips, TPU v5e and TPU v5p"):
        assert any(said in each for each in pair["warnings"])
        assert any(said in each for each in found["runs"]["warnings"])
    if differs:
        assert f"evaluated on different prompts: {differs}" in pair["reason"]
        assert any(differs in each for each in found["runs"]["warnings"])


def test_runs_of_one_side_are_not_compared_with_each_other(tmp_path, capsys):
    """As they would be if the other side, which has no curve, were forgotten."""
    ours = seeds_of_a_run(tmp_path, "prompt", asymptote=0.8)
    other = tmp_path / "other.csv"
    other.write_text("hours,pass_rate\n1,0.2\n2,0.3\n")
    for side, given in (
        ("behind", [*ours, "--vs", str(other)]),
        ("before", [str(other), "--vs", *ours]),
    ):
        assert main(["compare", *given]) == 2
        assert f"no run {side} --vs can be used" in capsys.readouterr().err


def with_files_of_its_own(folder, name, *, score="1", rows="a", **settings):
    """Seeds of a run whose prompts and reward function are files of each run."""
    runs = seeds_of_a_run(folder, name, **settings)
    for own in runs:
        at, prompts = Path(own), f"jsonl:{own}/prompts.jsonl"
        record = json.loads((at / "config.json").read_text())
        record["config"] |= {
            "environment": f"{own}/reward.py:score",
            "data": {"tasks": [prompts]},
        }
        (at / "config.json").write_text(json.dumps(record))
        (at / "environment.py").write_text(f"def score(*_): return {score}")
        file = {"origin": f"{own}/prompts.jsonl", "sha256": f"file of {rows}"}
        data = {prompts: {"prepared": {"files": [file]}, "sha256": rows}}
        (at / "data.json").write_text(json.dumps(dict.fromkeys(DATA_PARTS, data)))
    return runs


@pytest.mark.parametrize(
    ("other", "reason", "warning"),
    [
        pytest.param({"aggregation": "token"}, "is higher", None, id="a setting"),
        pytest.param(
            {"score": "2"}, "is higher", "environment = 'reward.py", id="text"
        ),
        pytest.param(
            {"reward": {"passed_at": 0.5}},
            "is higher",
            "reward.passed_at = 1.0 and 0.5",
            id="what passes",
        ),
        pytest.param(
            {"rows": "b"}, "evaluated on different prompts: data.tasks", None, id="rows"
        ),
    ],
)
def test_files_of_a_user_are_known_by_their_content(
    tmp_path, capsys, other, reason, warning
):
    """Each run has a copy under a path of its own, as in `notebook.run`."""
    common = {"reward": {"passed_at": 1.0}, "eval": {"num_prompts": 9, "sets": []}}
    ours = with_files_of_its_own(tmp_path, "ours", asymptote=0.8, **common)
    others = with_files_of_its_own(tmp_path, "other", asymptote=0.6, **common | other)
    assert main(["compare", *ours, *others, "--json", "--x=generated_tokens"]) == 0
    (pair,) = json.loads(capsys.readouterr().out)["pairs"]
    assert pair["num_runs"] == [3, 3] and reason in pair["reason"]
    said = [each for each in pair["warnings"] if "evaluated differently" in each]
    assert len(said) == bool(warning) and all(warning in each for each in said)


@pytest.mark.usefixtures("short_reports")
def test_a_directory_of_runs_is_its_runs(tmp_path, capsys):
    """Under names that tell them apart, whatever TensorBoard has of them."""
    for arm, top in (("high", 0.8), ("low", 0.7)):
        folder = tmp_path / arm
        folder.mkdir()
        runs = seeds_of_a_run(folder, arm, asymptote=top, aggregation=arm)
        for path in map(Path, runs):
            (path / "tensorboard").mkdir()
            (path / "tensorboard" / "events.out.tfevents.1").touch()
            path.rename(path.with_name(path.name.removeprefix(f"{arm}-")))
    with pytest.raises(CurveError, match="6 runs are below .*high/seed0"):
        load_curves(tmp_path)
    paths = [tmp_path / "high", "--vs", tmp_path / "low"]
    for given in ([tmp_path], paths):
        flags = [*map(str, given), "--json", "--x=generated_tokens"]
        assert main(["compare", *flags]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["pairs"][0]["names"] == ["high", "low"]
        assert {row["name"] for row in found["runs"]["rows"]} == {
            f"{arm}/seed{seed}" for arm in ("high", "low") for seed in range(3)
        }


def test_compute_of_a_cpu_is_in_tokens(tmp_path, capsys):
    ours = seeds_of_a_run(tmp_path, "prompt", asymptote=0.8)
    other = seeds_of_a_run(tmp_path, "pod", asymptote=0.7, chip="TPU v5p")
    for command in ("fit", "extrapolate", "plan"):
        assert main([command, ours[0]]) == 0
        said = capsys.readouterr()
        assert "generated_tokens" in said.out and "chip_hours" not in said.out
    assert main(["compare", *ours, "--vs", *other]) == 2
    assert "different x: compute_chip_hours, generated" in capsys.readouterr().err
    assert main(["compare", *ours, "--vs", *other, "--x-name=compute"]) == 2
    assert "different x: compute_chip_hours, generated" in capsys.readouterr().err
    hours = ["--x=compute_chip_hours"]
    assert main(["fit", ours[0], *hours]) == 0
    assert "chip-hours of a CPU are its wall time" in capsys.readouterr().out
    assert main(["compare", *ours, "--vs", *other, *hours, "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["pairs"][0]["winner"] is None
    assert "they decide nothing" in said.err
    assert main(["fit", *other, "--json"]) == 0
    assert "compute_chip_hours" in capsys.readouterr().out


@pytest.mark.usefixtures("short_reports")
def test_the_page_names_what_is_left_out_of_it(runs, tmp_path):
    short, page = tmp_path / "short.csv", tmp_path / "page.html"
    short.write_text("recipe,gpu_hours,pass_rate\nnew,100,0.3\nnew,200,0.4\n")
    broken = tmp_path / "broken.csv"
    broken.write_text("recipe,gpu_hours,pass_rate\nbad,100,7\n")
    flags = ["--x=gpu_hours", "--group=recipe", f"--out={page}"]
    assert main(["report", *map(str, (runs, short, broken)), *flags]) == 0
    said = page.read_text()
    assert "a run is left out: new: 2 points" in said
    assert f"a run is left out: {broken}:2: pass_rate = 7 is outside" in said


@pytest.mark.usefixtures("short_reports")
def test_one_run_of_several_that_cannot_be_used_is_left_out_by_name(tmp_path, capsys):
    ours = seeds_of_a_run(tmp_path, "prompt", asymptote=0.8)
    constant = write_run(tmp_path / "dead", seed=9, rates=[0.5] * 20)
    empty = tmp_path / "empty"
    empty.mkdir()
    for command in ("fit", "report"):
        flags = [] if command == "fit" else [f"--out={tmp_path / 'page.html'}"]
        assert main([command, *ours, constant, str(empty), *flags]) == 0
        said = capsys.readouterr()
        left_out = f"a run is left out: {constant}: constant curve" in said.err
        assert left_out == (command == "fit")
        assert f"a run is left out: {empty}: nothing to read" in said.err
        assert all(f"prompt-seed{seed}" in said.out for seed in range(3))
    assert main(["fit", constant]) == 2
    assert main(["fit", constant, str(empty)]) == 2
    rows = "".join(
        f"{name},{x},{0.5 if name == 'dead' else 0.2 + 0.6 * x / (x + 4)}\n"
        for name in ("one", "dead", "two")
        for x in range(20)
    )
    (tmp_path / "runs.csv").write_text("name,tokens,pass_rate\n" + rows)
    table = [str(tmp_path / "runs.csv"), "--x=tokens", "--group=name"]
    for command in ("fit", "plan", "extrapolate"):
        assert main([command, *table, "--json"]) == 0
        said = capsys.readouterr()
        assert [row["name"] for row in json.loads(said.out)] == ["one", "two"]
        assert "a run is left out: dead: constant curve" in said.err


def test_a_recipe_with_a_dead_seed_does_not_win_by_its_others(tmp_path, capsys):
    best = seeds_of_a_run(tmp_path, "prompt", asymptote=0.8)
    other = seeds_of_a_run(tmp_path, "token", asymptote=0.6, aggregation="token")
    dead = write_run(tmp_path / "prompt-seed3", seed=3, rates=[0.0] * 25)
    for runs, winner in ((best, "prompt"), ([*best, dead], None)):
        assert main(["compare", *runs, *other, "--json"]) == 0
        (pair,) = json.loads(capsys.readouterr().out)["pairs"]
        assert pair["winner"] == pair["paper_rule"]["winner"] == winner
    assert pair["reason"] == "not decided: prompt does not climb"


def test_no_recipe_takes_the_name_of_another(tmp_path, capsys):
    """Runs a-seed10 to a-seed12 are of recipe a, unless a run is called so."""
    runs = seeds_of_a_run(tmp_path, "a", asymptote=0.8, first=10)
    rates = sigmoid(
        np.arange(25.0), initial_reward=0.2, asymptote=0.6, exponent=2.0, midpoint=5.0
    ).tolist()
    runs.append(write_run(tmp_path / "b", seed=1, rates=rates, aggregation="token"))
    assert main(["compare", *runs, "--json"]) == 0
    (pair,) = json.loads(capsys.readouterr().out)["pairs"]
    assert pair["names"] == ["a", "b"] and pair["num_runs"] == [3, 1]
    runs.append(write_run(tmp_path / "a", seed=2, rates=rates, aggregation="none"))
    assert main(["compare", *runs, "--json"]) == 0
    named = {
        name: count
        for pair in json.loads(capsys.readouterr().out)["pairs"]
        for name, count in zip(pair["names"], pair["num_runs"], strict=True)
    }
    assert named == {"a-seed10": 3, "b": 1, "a": 1}


def test_settings_beside_a_table_do_not_make_its_runs_one_recipe(runs, capsys):
    beside = runs.parent / "config.json"
    beside.write_text(json.dumps({"config": {"seed": 0}}))
    assert run("compare", runs, "--json") == 0
    beside.unlink()
    assert len(json.loads(capsys.readouterr().out)["pairs"]) == 3


def test_nothing_is_ranked_over_chip_hours_of_a_cpu(tmp_path, capsys):
    first = seeds_of_a_run(tmp_path, "prompt", asymptote=0.8)[0]
    other = seeds_of_a_run(tmp_path, "token", asymptote=0.5, aggregation="token")[0]
    assert main(["compare", first, other, "--x=compute_chip_hours", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [row["rank"] for row in record["runs"]["rows"]] == [None, None]
    assert record["pairs"][0]["paper_rule"]["winner"] is None
    assert main(["compare", first, other]) == 0
    assert "0.0150 (that of ScaleRL's own runs)" in capsys.readouterr().out
