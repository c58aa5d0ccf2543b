"""The simulator against what others have measured, and its own size."""

import runpy

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
def test_a_thousand_steps_of_an_8b_run_are_a_million_events():
    outcome = BENCHMARK["thousand_steps"]()
    assert outcome.counts["trained_groups"] == 48_000  # of 16 rollouts
    assert outcome.counts["events"] < 1.5 * 16 * 48_000
