"""Watching a run: waiting, forecasting, alarm, TensorBoard, and the fit in a thread."""

import dataclasses
import json
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import scalerl_jax
from scalerl_jax.config import ScalingConfig
from scalerl_jax.run.directory import keep_end
from scalerl_jax.scaling import CurveError, load_curve, make_curve, sigmoid
from scalerl_jax.scaling.__main__ import main
from scalerl_jax.scaling.checking import assess, to_text
from scalerl_jax.scaling.live import LiveFit, Watch, num_steps_of, watch
from scalerl_jax.scaling.load import Selection

X = np.linspace(0.0, 10.0, 31)
NOISE = np.random.default_rng(3).normal(0.0, 0.005, X.size)
CLIMB = NOISE + sigmoid(
    X, initial_reward=0.2, asymptote=0.7, exponent=2.0, midpoint=2.0
)
COLLAPSE = np.where(X > 7.0, CLIMB - 0.1 * (X - 7.0), CLIMB)


def write_run(directory, y, count=None, num_steps=None):
    """evals.jsonl with the first `count` evaluations, one every 10 steps."""
    rows = [
        {"step": 10 * i, "compute_chip_hours": X[i], "pass_rate": y[i]}
        for i in range(len(X) if count is None else count)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / "evals.jsonl").write_text(text)
    if num_steps is not None:
        settings = {"config": {"train": {"num_steps": num_steps}}}
        (directory / "config.json").write_text(json.dumps(settings))
    return directory


def test_a_run_that_keeps_to_its_forecast_gives_no_alarm():
    status = assess(make_curve(X, CLIMB))
    assert status.alarm is None and len(status.checks) == 15
    assert status.fitted_until == pytest.approx(5.0)
    # 0.2 + 0.5 / (1 + (2 / 20)^2) = 0.69505
    assert status.horizon == 20.0
    assert status.forecast == pytest.approx(0.69505, abs=0.01)
    assert status.forecast_band.low < 0.69505 < status.forecast_band.high


@pytest.mark.parametrize("sign, where", [(-1, "below"), (1, "above")])
def test_a_run_that_leaves_its_band_is_an_alarm(sign, where):
    y = np.where(X > 5.0, CLIMB + sign * 0.08, CLIMB)
    status = assess(make_curve(X, y))
    assert [check.side for check in status.checks[-3:]] == [sign] * 3
    assert f"the last 3 evaluations are {where} the 99 % band" in status.alarm
    assert status.falling == (sign < 0) and "ALARM" in to_text(status)
    assert assess(make_curve(X, y), patience=20).alarm is None


def test_a_curve_that_collapses_is_an_alarm_without_a_band():
    y = np.where(X > 4.0, 0.05, CLIMB)
    status = assess(make_curve(X, y))
    assert status.falling and "the curve falls" in status.alarm
    small = dataclasses.replace(
        make_curve(X[:7], CLIMB[:7] - [0, 0, 0, 0.1, 0, 0, 0.1]),
        y_se=np.full(6, 0.1),
    )
    assert assess(small).alarm is None


def test_an_early_run_waits_and_says_for_what():
    status = assess(make_curve(X[:3], CLIMB[:3]))
    assert status.fit is None and "at least 4 are needed" in status.waiting
    assert "no fit yet" in to_text(status)


def test_watch_once_prints_and_fills_tensorboard(tmp_path, capsys):
    write_run(tmp_path, CLIMB, num_steps=600)
    assert main(["watch", str(tmp_path), "--once"]) == 0
    said = capsys.readouterr().out
    # 300 of 600 steps at 10 chip-hours: the run will end at 20.
    assert "forecast at compute_chip_hours = 20: 0.6" in said and "no alarm" in said
    events = EventAccumulator(str(tmp_path / "tensorboard" / "scaling"))
    events.Reload()
    (actual,) = events.Scalars("scaling/actual")
    assert (actual.step, actual.value) == (300, pytest.approx(CLIMB[-1]))
    (low,), (high,) = (
        events.Scalars(f"scaling/{name}") for name in ("A_low", "A_high")
    )
    assert low.value < 0.7 < high.value
    (image,) = events.Images("scaling/fit")
    assert image.encoded_image_string.startswith(b"\x89PNG") and image.width > 500
    # What it wrote does not stand in the way of reading the run's own events.
    assert load_curve(tmp_path).x.size == 30


def test_an_alarm_is_status_3_and_bad_input_status_2(tmp_path, capsys):
    write_run(tmp_path, COLLAPSE)
    command = ["watch", str(tmp_path), "--once", "--no-tensorboard"]
    assert main(command) == 3
    assert "ALARM" in capsys.readouterr().out
    assert not (tmp_path / "tensorboard").exists()
    assert main([*command, "--y=reward"]) == 2
    assert "choose --y from" in capsys.readouterr().err
    write_run(tmp_path, CLIMB, count=3)
    assert main(command) == 2
    assert "at least 4" in capsys.readouterr().err


def test_watch_follows_a_run_to_its_end(tmp_path, capsys):
    """It waits for the first file, shows each growth once, keeps the alarm."""
    run = Watch(path=tmp_path)
    counts = iter([2, 12, 12, 28, 31])

    class Clock(threading.Event):
        def wait(self, timeout=None):
            write_run(tmp_path, COLLAPSE, count=next(counts), num_steps=300)
            return False

    assert watch(run, every_s=9.0, once=False, clock=Clock()) == 3
    said = capsys.readouterr().out
    assert said.count("waiting: ") == 1 and said.count("no fit yet") == 1
    assert said.count("evaluations, the last at") == 4
    assert run.at_end and run.falling


def test_watch_waits_for_rows_but_not_for_a_column_that_the_header_lacks(
    tmp_path, capsys
):
    file = tmp_path / "log.csv"
    texts = iter(["", "rollouts,pass_rate\n", "rollouts,pass_rate\n10,0.5\n"])

    class Clock(threading.Event):
        def wait(self, timeout=None):
            file.write_text(next(texts))
            return False

    with pytest.raises(CurveError, match=r"choose --x from: rollouts, pass_rate"):
        watch(Watch(path=file), every_s=9.0, once=False, clock=Clock())
    assert capsys.readouterr().out.count("waiting: ") == 2  # for the file, and rows
    file.write_text("run,step,pass_rate\na,1,0.5\nb,1,0.4\n")
    several = Watch(path=file, selection=Selection(group="run"))
    with pytest.raises(CurveError, match="2 curves where one is needed: a, b"):
        watch(several, every_s=9.0, once=False, clock=Clock())
    for name in ("one", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "evals.jsonl").touch()
    with pytest.raises(CurveError, match="2 runs are below this directory"):
        watch(Watch(path=tmp_path / "runs"), every_s=9.0, once=False, clock=Clock())
    # A column that is named may come: some loggers write the header again.
    texts = iter(["rollouts,pass_rate,tokens\n10,0.5,3000\n"])
    named = Watch(path=file, selection=Selection(x="tokens"))
    with pytest.raises(StopIteration):
        watch(named, every_s=9.0, once=False, clock=Clock())
    assert "waiting: " in (said := capsys.readouterr().out) and "'tokens'" in said


def test_watch_sees_a_last_evaluation_without_tokens_since_the_one_before(tmp_path):
    """It replaces the one before, so that the number of points stays."""
    write_run(tmp_path, CLIMB, count=1, num_steps=310)
    run = Watch(path=tmp_path, selection=Selection(x="generated_tokens"))
    for count in (31, 32):
        rows = [
            {"step": 10 * i, "generated_tokens": 100 * min(i, 30), "pass_rate": rate}
            for i, rate in enumerate([*CLIMB, 0.9][:count])
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "evals.jsonl").write_text(text)
        status = run.look()
        assert status is not None and run.at_end == (count == 32)
        assert status.fit.whole_curve.y[-1] == rows[-1]["pass_rate"]
    assert run.look() is None


@pytest.mark.parametrize(
    "y, count, status", [(CLIMB, 31, 0), (COLLAPSE, 31, 3), (CLIMB, 2, 0)]
)
def test_watch_ends_with_a_run_that_ended_early(tmp_path, capsys, y, count, status):
    write_run(tmp_path, y, count=count, num_steps=900)

    class Clock(threading.Event):
        waits = 0

        def wait(self, timeout=None):
            self.waits += 1
            assert self.waits < 9, "it would go on for ever"
            keep_end(tmp_path, "of scaling.stop")
            return False

    clock = Clock()
    run = Watch(path=tmp_path)
    assert watch(run, every_s=9.0, once=False, clock=clock) == status
    said = capsys.readouterr().out
    assert said.endswith("the run has ended: of scaling.stop\n") and clock.waits == 1
    keep_end(tmp_path, "")  # as the next start does
    with pytest.raises(AssertionError, match="for ever"):
        clock.waits = 8
        watch(Watch(path=tmp_path), every_s=9.0, once=False, clock=clock)


def test_ctrl_c_ends_watch_with_130(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("scalerl_jax.scaling.__main__.follow", interrupted)
    assert main(["watch", str(tmp_path), "--no-tensorboard"]) == 130


def wait_for(condition):
    """Until a thread has got there; fails after a minute."""
    event = threading.Event()
    for _ in range(6000):
        if condition():
            return
        event.wait(0.01)
    raise AssertionError("the thread did not get there")


def test_the_live_fit_says_when_to_stop_and_never_blocks(tmp_path):
    said = []
    live = LiveFit(ScalingConfig(stop="alarm"), tmp_path, note=said.append)
    with live:
        live.evaluated()  # before there is a file: reported, not fatal
        wait_for(lambda: any("nothing to read" in line for line in said))
        write_run(tmp_path, COLLAPSE, count=20)
        live.evaluated()
        wait_for(lambda: any("forecast" in line for line in said))
        assert live.stop_reason is None
        write_run(tmp_path, COLLAPSE)
        live.evaluated()
        wait_for(lambda: live.stop_reason is not None)
    assert "the curve falls" in live.stop_reason
    assert any("scaling alarm" in line for line in said)


def test_a_last_evaluation_during_a_fit_is_fitted_too(tmp_path):
    """The fit of the one before lasts until the run has ended."""
    said = []

    def note(line):
        said.append(line)
        if len(said) == 1:
            wait_for(lambda: live._ended)

    live = LiveFit(ScalingConfig(), write_run(tmp_path, CLIMB, count=20), note=note)
    with live:
        live.evaluated()
        wait_for(lambda: said)
        write_run(tmp_path, CLIMB, count=21)
        live.evaluated()
    assert len(said) == 2


@pytest.mark.parametrize("min_gain, stops", [(0.05, True), (0.0, False)])
def test_the_live_fit_stops_on_a_plateau(tmp_path, min_gain, stops):
    write_run(tmp_path, CLIMB)
    said = []
    settings = ScalingConfig(stop="plateau", min_gain=min_gain)
    live = LiveFit(settings, tmp_path, note=said.append)
    with live:
        live.evaluated()
    assert (live.stop_reason is not None) == stops
    if stops:
        assert "twice the compute promises at most" in live.stop_reason


def test_a_run_without_a_live_fit_does_not_load_the_fitter():
    """The loop imports it in one function; what imports it at its top is no run."""
    package = Path(scalerl_jax.__file__).parent
    importers = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if path.parent.name not in ("scaling", "study")
        and path.stem != "notebook"
        and re.search(r"(?m)^(from|import) scalerl_jax\.scaling", path.read_text())
    }
    assert importers == set()


def test_a_failure_of_the_live_fit_is_reported_and_not_fatal(tmp_path):
    write_run(tmp_path, CLIMB)
    (tmp_path / "tensorboard").write_text("not a directory")
    said = []
    live = LiveFit(ScalingConfig(stop="alarm"), tmp_path, note=said.append)
    with live:
        live.evaluated()
    assert any("scaling.live failed" in line for line in said)


def test_a_torn_last_line_is_left_out_and_any_other_is_an_error(tmp_path, capsys):
    write_run(tmp_path, CLIMB)
    assert main(["fit", str(tmp_path)]) == 0
    whole = capsys.readouterr().out.splitlines()
    with open(tmp_path / "evals.jsonl", "a") as file:
        file.write('{"step": 310, "compu')
    assert main(["fit", str(tmp_path)]) == 0
    torn = capsys.readouterr().out.splitlines()
    (said,) = (line for line in torn if "line 32, the last, is half written" in line)
    assert [line for line in torn if line != said] == whole
    Watch(path=tmp_path).look()
    with open(tmp_path / "evals.jsonl", "a") as file:
        file.write("\n")
    with pytest.raises(CurveError, match="remove the line"):
        Watch(path=tmp_path).look()


def test_watch_says_of_a_curve_what_fit_says_of_it(tmp_path, capsys):
    write_run(tmp_path, CLIMB)
    with (tmp_path / "evals.jsonl").open("a") as file:
        file.write(json.dumps({"step": 300, "compute_chip_hours": 10, "pass_rate": 1}))
    noted = []
    for command in (["fit"], ["watch", "--once", "--no-tensorboard"]):
        assert main([*command, str(tmp_path)]) == 0
        lines = capsys.readouterr().out.splitlines()
        noted.append([line for line in lines if line.startswith("warning: ")])
    assert noted[0] == noted[1]
    assert any("a resumed run wrote their step again" in note for note in noted[1])


@pytest.mark.parametrize("text", ["1e999", "NaN", "0", "-5", "1" + "0" * 400, '"9"'])
def test_an_odd_number_of_steps_is_unknown(tmp_path, text):
    config = f'{{"config": {{"train": {{"num_steps": {text}}}}}}}'
    (tmp_path / "config.json").write_text(config)
    assert num_steps_of(tmp_path) is None
