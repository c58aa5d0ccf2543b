"""Alarms of runs that are dead or silent, at times that are given; and the forecast."""

import datetime
import json

import pytest

from scalerl_jax.launch.outcome import Outcome
from scalerl_jax.launch.place import Machines
from scalerl_jax.launch.watching import find_alarm, forecast
from scalerl_jax.scaling import sigmoid

STARTED = "2026-11-23T10:00:00+00:00"
UP = Machines(state="up", said="ACTIVE")


def at(clock):
    return datetime.datetime.fromisoformat(f"2026-11-23T{clock}+00:00")


def alarm(files, clock, *, state="running", there=UP, last_step=""):
    outcome = Outcome(state=state, command=("run",), at=STARTED)
    return find_alarm(there, outcome, files, last_step=last_step, now=at(clock))


def steps(files, seconds):
    rows = [{"step": n, "time/step_s": each} for n, each in enumerate(seconds)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (files / "metrics.jsonl").write_text(text + '{"step": 9')


@pytest.mark.parametrize("state", ["absent", "broken"])
def test_a_run_whose_machines_went_is_dead(tmp_path, state):
    gone = Machines(state=state, said="SUSPENDED")
    said = alarm(tmp_path, "10:00:01", there=gone)
    assert said.startswith("the run died with its machines, which are SUSPENDED")
    said = alarm(tmp_path, "10:00:01", there=gone, state="preempted")
    assert said.startswith("the run was preempted with its machines, which are SUSP")
    assert not alarm(tmp_path, "23:00:00", state="preempted")
    slice_of_two = Machines(state="partial", said="one of two")
    assert not alarm(tmp_path, "10:00:01", there=slice_of_two)


def test_the_first_step_may_take_an_hour(tmp_path):
    assert not alarm(tmp_path, "11:00:00")
    said = alarm(tmp_path, "11:01:00")
    assert said.startswith(
        "the run has made no step for 61 minutes, and there was none"
    )


def test_others_ten_times_as_long_as_the_slowest_of_late(tmp_path):
    steps(tmp_path, [400.0] * 2 + [100.0] * 19 + [120.0])  # two are too long ago
    last_step = "2026-11-23T11:00:00+0000"  # as gcloud writes it
    assert not alarm(tmp_path, "11:20:00", last_step=last_step)
    said = alarm(tmp_path, "11:20:30", last_step=last_step)
    assert "no step for 20 minutes, and the slowest of the last 20 took 120 s" in said
    assert not alarm(tmp_path, "11:20:30", last_step=last_step, state="done")


def test_but_a_quarter_of_an_hour_at_least(tmp_path):
    steps(tmp_path, [2.0])
    assert not alarm(tmp_path, "10:15:00")
    assert alarm(tmp_path, "10:15:01")
    # A new attempt begins anew, however old the last step is.
    assert not alarm(tmp_path, "10:15:00", last_step="2026-11-22T11:00:00+0000")


def test_the_forecast_is_that_of_watch_and_falling_evaluations_are_an_alarm(tmp_path):
    config = {"config": {"train": {"num_steps": 40}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert forecast(tmp_path).text.startswith("forecast: not yet: ")

    def evaluated(rates):
        rows = [
            {"step": n, "compute_chip_hours": 0.1 * n, "pass_rate": rate}
            for n, rate in enumerate(rates)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "evals.jsonl").write_text(text)
        return forecast(tmp_path)

    curve = [
        float(
            sigmoid(0.1 * n, initial_reward=0.2, asymptote=0.8, exponent=2, midpoint=1)
        )
        for n in range(21)
    ]
    found = evaluated(curve)
    at_the_end = "forecast at compute_chip_hours = 4"
    (line,) = [each for each in found.text.splitlines() if at_the_end in each]
    assert not found.alarm
    # 0.2 + 0.6 / (1 + (1 / 4) ** 2) at the 40th step
    assert float(line.split(": ")[1].split(",")[0]) == pytest.approx(0.7647, abs=0.01)
    assert found.numbers["forecast"] == pytest.approx(0.7647, abs=0.01)
    assert evaluated(curve[:14] + [0.3] * 7).alarm
