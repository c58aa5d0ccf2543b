"""The simulator against what others have measured, and its own speed."""

import runpy
import time

import pytest
import small_run

BENCHMARK = runpy.run_path(str(small_run.ROOT / "benchmarks" / "simulate.py"))


@pytest.mark.parametrize(
    "run", BENCHMARK["PUBLISHED"], ids=[str(run[:5]) for run in BENCHMARK["PUBLISHED"]]
)
def test_six_measured_runs_are_met(run):
    *settings, measured, _ = run
    found = BENCHMARK["published_staleness"](*settings)
    assert found == pytest.approx(measured, rel=0.1)


@pytest.mark.slow
def test_a_thousand_steps_of_an_8b_run_take_ten_seconds():
    began = time.process_time()
    outcome = BENCHMARK["thousand_steps"]()
    assert time.process_time() - began < 10.0
    assert outcome.counts["trained_groups"] == 48_000
