"""The loop that keeps machines under a run, on a place that follows a script."""

import dataclasses

import pytest

from scalerl_jax.launch.outcome import Outcome
from scalerl_jax.launch.place import Machines, Patience, Refused, keep

PATIENCE = Patience(poll_s=0.0, first_pause_s=0.0, refusals=2, losses=3)
STATES = {"ABSENT": "absent", "WAITING": "coming", "ACTIVE": "up", "GONE": "broken"}


class Script:
    """Says what it is told to, a word at each look, and notes what is asked of it."""

    started = "the run starts"

    def __init__(self, *words, attempts=(), refuse=0, silent=0, final="done"):
        self.words, self.done, self.refuse = list(words), [], refuse
        self.silent = silent  # times that it does not say how things are
        self.attempts, self.final = list(attempts), final

    def outcome(self):
        self.answer()
        if not self.words:
            return Outcome(state=self.final, command=(), attempts=1)
        attempts = self.attempts.pop(0) if self.attempts else 0
        return Outcome(state="running", command=(), attempts=attempts)

    def answer(self):
        if self.silent:
            self.silent -= 1
            raise Refused("the cloud is not reached")

    def machines(self):
        self.answer()
        word = self.words.pop(0)
        return Machines(state=STATES[word], said=word)

    def create(self):
        if self.refuse:
            self.refuse -= 1
            raise Refused("no more capacity")
        self.done.append("create")

    def replace(self):
        self.done.append("remove")
        return []

    def start(self):
        self.done.append("start")
        return self.started


def test_machines_are_made_again_and_the_run_started_on_them():
    place, lines = Script("ABSENT", "WAITING", "ACTIVE", "GONE", "ABSENT", "ACTIVE"), []
    assert keep(place, patience=PATIENCE, tell=lines.append).state == "done"
    assert place.done == ["create", "start", "remove", "create", "start"]
    assert lines[0] == "machines are ABSENT" and any(
        "lost machines" in each for each in lines
    )


@pytest.mark.parametrize("final", ["done", "mistake", "failed"])
def test_nothing_is_made_for_a_run_that_is_over(final):
    place = Script(final=final)
    assert keep(place, patience=PATIENCE, tell=print).state == final
    assert not place.done


def test_refusals_are_tried_again_up_to_a_limit():
    place, lines = Script("ABSENT", "ABSENT", "ABSENT", refuse=2), []
    keep(place, patience=PATIENCE, tell=lines.append)
    assert place.done == ["create"]
    assert [line for line in lines if "try 3" in line]
    with pytest.raises(RuntimeError, match="no more capacity; given up after 3 tries"):
        keep(Script(*["ABSENT"] * 9, refuse=9), patience=PATIENCE, tell=lines.append)


def test_a_place_that_does_not_answer_is_asked_again():
    lines = []

    def look(machines, outcome):
        if machines.state == "up" and not looked:
            looked.append(True)
            place.silent = 1  # at the next outcome
            raise Refused("the run's files are not reached")  # at this look

    looked = []
    place = Script("ABSENT", "ACTIVE", "GONE", "ABSENT", "ACTIVE", silent=2)
    patience = dataclasses.replace(PATIENCE, refusals=4)
    assert keep(place, patience=patience, tell=lines.append, look=look).state == "done"
    assert place.done == ["create", "remove", "create", "start"]
    waits = [line for line in lines if "; try " in line]
    assert [line.partition(";")[0] for line in waits] == [
        *["the cloud is not reached"] * 2,
        *("the run's files are not reached", "the cloud is not reached"),
    ]
    with pytest.raises(RuntimeError, match="not reached; given up after 3 tries"):
        keep(Script("ACTIVE", silent=9), patience=PATIENCE, tell=lines.append)


def test_polls_that_fail_now_and_then_are_not_failures_in_a_row():
    place = Script(*["WAITING"] * 9)
    keep(
        place,
        patience=PATIENCE,
        tell=lambda _: None,
        look=lambda *_: setattr(place, "silent", 1),
    )


def test_machines_that_never_begin_a_run_are_not_made_for_ever():
    with pytest.raises(RuntimeError, match="3 machines in a row were lost before"):
        keep(place := Script(*["GONE"] * 9), patience=PATIENCE, tell=lambda _: None)
    assert place.done == ["remove"] * 2
    # The file of the run says that it runs, as before its machines went for good.
    with pytest.raises(RuntimeError, match="3 machines in a row were lost before"):
        place = Script(*["ACTIVE", "GONE"] * 9, attempts=[5] * 18)
        keep(place, patience=PATIENCE, tell=lambda _: None)
    # Preemptions of a run that goes on have no limit.
    place = Script(*["GONE"] * 9, attempts=range(9))
    assert keep(place, patience=PATIENCE, tell=lambda _: None).state == "done"


def test_slices_of_a_run_that_goes_on_are_replaced_without_a_limit():
    place = Script(*["ACTIVE", "GONE"] * 9, attempts=[1] * 18)
    place.started = "it runs already"  # on the head, which is on demand
    assert keep(place, patience=PATIENCE, tell=lambda _: None).state == "done"


def test_machines_of_another_job_end_the_loop():
    place = Script("ABSENT")
    place.machines = lambda: Machines(state="up", said="ACTIVE", wrong="name is taken")
    with pytest.raises(RuntimeError, match="name is taken"):
        keep(place, patience=PATIENCE, tell=lambda _: None)
