"""The loop that keeps machines under a run, on a place that follows a script."""

import dataclasses

import pytest

from scalerl_jax.launch import __main__ as launch
from scalerl_jax.launch.job import read_job
from scalerl_jax.launch.outcome import Outcome
from scalerl_jax.launch.place import Machines, Patience, Refused, keep

pytestmark = pytest.mark.filterwarnings("ignore:the load_module")  # ml_collections'
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


class Laptop(Script):
    """A place of which `launch run` can do nothing but what it is asked here."""

    def check(self):
        pass

    def machines(self):
        up = Machines(state="up", said="ACTIVE")
        return super().machines() if self.words else up

    def forget(self, before):
        pass

    def logs(self, lines):
        self.done.append("logs")
        return "host: Killed\n"

    def end(self):
        self.done.append("end")

    def remove(self):
        self.done.append("removed")
        return []

    def fetch(self, target):
        self.done.append("fetch")
        raise Refused("the bucket is not reached")


def launch_run(place, *flags):
    words = ["run", "--place=local", "--name=x", "--bucket=runs", "--config=tiny"]
    parsed = launch.make_parser().parse_args([*words, "--poll-s=0.01", *flags])
    return launch._run(read_job(parsed), place, parsed, [])


@pytest.mark.parametrize("state, logs", [("failed", ["logs"]), ("done", [])])
def test_machines_of_a_run_that_is_over_go_though_its_files_cannot_be_fetched(
    state, logs, capfd
):
    place = Laptop(final=state)
    with pytest.raises(Refused, match="the bucket is not reached"):
        launch_run(place)
    assert place.done == [*logs, "end", "removed", "fetch"]
    assert ("host: Killed" in capfd.readouterr().err) == bool(logs)


def test_who_gives_up_says_that_machines_stay(capfd, monkeypatch):
    place = Laptop("ABSENT", "ACTIVE")
    monkeypatch.setattr(place, "create", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        launch_run(place)
    assert "`launch stop` removes them" in capfd.readouterr().err


def test_a_look_that_fails_ends_nothing(monkeypatch):
    place = Laptop("ABSENT", "ACTIVE", final="done")
    monkeypatch.setattr(place, "fetch", lambda target: None)

    def unknown():
        raise RuntimeError("gcloud crashed")

    monkeypatch.setattr(place, "last_step", unknown, raising=False)
    assert launch_run(place, "--fetch-s=0.01", "--no-fit") == 0
    assert place.done == ["create", "start", "end", "removed"]


@pytest.mark.parametrize(
    "flag",
    [
        *("--poll-s=0", "--poll-s=-1", "--poll-s=nan", "--fetch-s=nan"),
        "--preemptions=-1",
    ],
)
def test_a_number_that_cannot_be_is_refused_before_anything_is_made(flag, tmp_path):
    words = f"run --place=local --name=x --bucket={tmp_path}/runs --config=tiny"
    with pytest.raises(ValueError, match=flag):
        launch.main([*words.split(), flag])
    assert not list(tmp_path.iterdir())
