"""Machines of a job, as every place has them, and the loop that keeps them under a run.

The loop and the commands know no more of a place than `Place`.  The loop
remembers nothing: what to do next follows from what the place and the run's directory
say.  It may be ended and started again at any moment, from any machine.
"""

import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Literal, Protocol

from scalerl_jax.launch.outcome import FINAL, Outcome
from scalerl_jax.process.printing import to_stderr

# absent: there is nothing.  partial: some machines are there, and others must be asked
# for.  coming: it was asked for.  up: it can run something.
# broken: it will not come back, and must be removed.  going: it is being removed.
State = Literal["absent", "partial", "coming", "up", "broken", "going"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machines:
    """The machines of a job, as their place says just now."""

    state: State
    said: str  # the place's own word: ACTIVE, SUSPENDED
    created: str = ""  # ISO 8601
    wrong: str = ""  # machines of this name that another job has made


class Place(Protocol):
    """Machines for one job."""

    def check(self) -> None:
        """Refuse, before anything is made, what this place cannot give."""
        ...

    def machines(self) -> Machines:
        """Return the state of the job's machines, as the place reports it."""
        ...

    def create(self) -> None:
        """Ask for the machines."""
        ...

    def replace(self) -> list[str]:
        """Remove what is broken; return a line for each thing that stays."""
        ...

    def remove(self) -> list[str]:
        """Remove all there is; return a line for each thing that stays."""
        ...

    def start(self) -> str:
        """Start the run's supervisor where it does not run; return what was done."""
        ...

    def end(self) -> None:
        """Ask the run to save itself and to end, and wait as long as that may take."""
        ...

    def outcome(self) -> Outcome | None:
        """Return the run's outcome so far; None: it never was started."""
        ...

    def last_step(self) -> str:
        """Return when the run last wrote a step, ISO 8601; empty: never."""
        ...

    def logs(self, lines: int) -> str:
        """Return the last lines of every host, each with the host's name."""
        ...

    def fetch(self, target: str) -> None:
        """Bring the run's files here, all but checkpoints."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patience:
    """Seconds and tries that the loop has for each thing it waits for."""

    poll_s: float = 30.0
    first_pause_s: float = 60.0  # after a refusal; then twice as long each time
    longest_pause_s: float = 900.0
    refusals: int = 60  # in a row, of machines or of the run's start
    losses: int = 20  # in a row, of machines on which nothing was even begun


class Refused(RuntimeError):
    """The place does not give what it could give at another time."""


def keep(
    place: Place,
    *,
    patience: Patience,
    tell: Callable[[str], None],
    look: Callable[[Machines, Outcome | None], None] = lambda *_: None,
) -> Outcome:
    """Make machines, start the run, and make them again, until the run is over.

    Args:
        tell: takes a line for each thing that changes.
        look: is shown what is there at every turn.

    Raises:
        RuntimeError: the place refuses too often, or for good.
    """
    pause_s, refusals, before = patience.first_pause_s, 0, ""
    losses = _Losses(patience.losses)
    while True:
        outcome = place.outcome()
        if outcome is not None and outcome.state in FINAL:
            return outcome
        machines = place.machines()
        if machines.said != before:
            tell(f"machines are {machines.said}")
            before = machines.said
        look(machines, outcome)
        if machines.state == "broken":
            losses.count(outcome)
        try:
            _turn(place, machines, tell)
        except Refused as refused:
            refusals += 1
            if refusals > patience.refusals:
                raise RuntimeError(f"{refused}; given up after {refusals} tries") from (
                    refused
                )
            tell(f"{refused}; try {refusals + 1} in {pause_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, patience.longest_pause_s)
            continue
        if machines.state == "up":
            pause_s, refusals = patience.first_pause_s, 0
        if machines.state not in ("absent", "partial", "broken"):
            time.sleep(patience.poll_s)


class _Losses:
    """Machines that went before the run was begun on them, in a row."""

    def __init__(self, most: int) -> None:
        self._most, self._lost, self._attempts = most, 0, -1

    def count(self, outcome: Outcome | None) -> None:
        """Count one more.

        Raises:
            RuntimeError: it is one too many.
        """
        attempts = outcome.attempts if outcome else 0
        self._lost = self._lost + 1 if attempts == self._attempts else 0
        self._attempts = attempts
        if self._lost >= self._most:
            raise RuntimeError(
                f"{self._lost} machines in a row went before the run was begun on "
                f"them; `launch logs` shows what the last one said"
            )


def _turn(place: Place, machines: Machines, tell: Callable[[str], None]) -> None:
    """Do the one thing that is next."""
    if machines.wrong:
        raise RuntimeError(machines.wrong)
    if machines.state in ("absent", "partial"):
        place.create()
        tell("machines are asked for")
    elif machines.state == "broken":
        tell("they will not come back; they are removed and made again")
        left = place.replace()
        if left:
            raise Refused(f"cannot be removed: {'; '.join(left)}")
    elif machines.state == "up":
        done = place.start()
        if "already" not in done:
            tell(done)


def say(line: str) -> None:
    """Write a line with the time of day to stderr."""
    to_stderr(f"launch {time.strftime('%H:%M:%S')}: {line}\n")
    sys.stderr.flush()
