"""Evaluations in the loop and beside it, of generators that end when a test says so."""

import contextlib
import dataclasses
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from scalerl_jax.controller.evaluations import BesideRun, EvaluationPoint, InLoop
from scalerl_jax.controller.fleet import Fleet
from scalerl_jax.generation.evaluation import Abandoned
from scalerl_jax.run.progress import Progress

POINT = EvaluationPoint(version=4, publication="params of 4", report={"chip_hours": 1})


class Idle:
    """A dispatcher of one replica, which finishes nothing."""

    def __init__(self):
        self.replicas = [SimpleNamespace(number=0, where="here", hang="")]
        self.jobs = []

    def submit(self, job, number=None):
        self.jobs.append(Future())
        return self.jobs[-1]

    def turn(self):
        pass

    def withdraw(self, jobs):
        pass

    def end(self, timeout_s):
        pass


def test_a_long_part_is_waited_for_unless_its_replica_hangs():
    idle = Idle()
    fleet = Fleet(
        make_dispatcher=lambda wake: idle,
        orders=SimpleNamespace(raise_if_over=lambda: None, fail=None),
        summarize=lambda judged, policy_version: judged,
        num_held_out=2,
        job_timeout_s=0.01,
        progress=Progress(),
    )

    def evaluate():
        return fleet.evaluate(
            "params", policy_version=0, stopped=lambda: False, beside=True
        )

    with ThreadPoolExecutor(1) as caller:
        slow = caller.submit(evaluate)
        with pytest.raises(TimeoutError):
            slow.result(1.0)
        for number, each in enumerate(idle.jobs):
            each.set_result([number])
        assert slow.result(60) == ([0, 1], [])
        idle.replicas[0].hang = "is in one step"
        with pytest.raises(TimeoutError, match=r"replica 0 \(here\) is in one step"):
            caller.submit(evaluate).result(60)
    fleet.stop(60)


class Generators:
    """Judge nothing: the result is what they were asked for, once they may end."""

    def __init__(self, error=None):
        self.may_end, self.error = threading.Event(), error

    def evaluate(
        self, publication, *, policy_version, stopped, beside=False, probe=True
    ):
        assert self.may_end.wait(60)
        if self.error:
            raise self.error
        pairs = ["pair"] if probe else []
        return (publication, policy_version, stopped(), beside), pairs


class Mismatch:
    """Tell which state and pairs were compared."""

    def __call__(self, state, sampled):
        self.compared = (state, sampled)
        return self

    def metrics(self):
        return {"mismatch/kl": 0.5}


def collected(evaluations):
    """Look until the evaluation under way has ended."""
    for _ in range(6000):
        if (made := evaluations.collect()) is not None:
            return made
        threading.Event().wait(0.01)
    raise AssertionError("it does not end")


def test_the_loop_waits_for_an_evaluation_which_measures_the_mismatch():
    generators, mismatch, counted = Generators(), Mismatch(), []
    generators.may_end.set()

    @contextlib.contextmanager
    def activity():
        yield
        counted.append("eval")

    evaluations = InLoop(generators=generators, mismatch=mismatch, activity=activity)
    made = evaluations.begin(POINT, "state", stopped=lambda: False)
    assert made.point is POINT
    assert made.result == ("params of 4", 4, False, False)
    assert made.mismatch == {"mismatch/kl": 0.5}
    assert mismatch.compared == ("state", ["pair"])
    assert counted == ["eval"] and not evaluations.beside
    assert evaluations.under_way is None and evaluations.collect() is None
    # A version that the check at the start has compared is not sampled again.
    del mismatch.compared
    point = dataclasses.replace(POINT, compared=True)
    made = evaluations.begin(point, "state", stopped=lambda: False)
    assert made.result == ("params of 4", 4, False, False)
    assert made.mismatch is None and not hasattr(mismatch, "compared")


def test_an_evaluation_beside_the_run_is_collected_once_it_has_ended():
    generators = Generators()
    evaluations = BesideRun(generators)
    assert evaluations.begin(POINT, "state", stopped=lambda: True) is None
    assert evaluations.under_way == 4 and evaluations.collect() is None
    generators.may_end.set()
    made = collected(evaluations)
    assert made.point is POINT and made.mismatch is None
    assert made.result == ("params of 4", 4, True, True)
    assert evaluations.under_way is None and evaluations.collect() is None
    evaluations.begin(POINT, "state", stopped=lambda: True)  # the next one
    assert collected(evaluations).point is POINT


def test_what_ends_an_evaluation_beside_the_run_is_raised_once():
    generators = Generators(error=Abandoned())
    generators.may_end.set()
    evaluations = BesideRun(generators)
    evaluations.begin(POINT, "state", stopped=lambda: True)
    with pytest.raises(Abandoned):
        collected(evaluations)
    assert evaluations.under_way is None and evaluations.collect() is None
