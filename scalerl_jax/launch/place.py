"""`Place`, the interface to a job's machines, and `keep`, which replaces lost machines.

`keep` stores nothing: its next action follows from the state of the machines and the
run's directory.  It may be stopped and restarted at any moment, from any machine.
"""

import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Literal, Protocol

from scalerl_jax.launch.outcome import FINAL, Outcome
from scalerl_jax.process.printing import to_stderr

# absent: no machine exists.  partial: some machines exist, others must be requested.
# coming: requested, not ready.  up: ready to run commands.
# broken: lost for good, must be removed.  going: being removed.
# unknown: the place's word is not in our tables; only `stop` acts on such machines.
State = Literal["absent", "partial", "coming", "up", "broken", "going", "unknown"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machines:
    """State of a job's machines, as their place reports it now."""

    state: State
    said: str  # the place's own word: ACTIVE, SUSPENDED
    created: str = ""  # time, ISO 8601
    wrong: str = ""  # error line if machines of this name are another job's


class Place(Protocol):
    """Machines for one job."""

    def check(self) -> None:
        """Raise ValueError, before anything is created, if the place cannot run it."""
        ...

    def machines(self) -> Machines:
        """Return the state of the job's machines, as the place reports it."""
        ...

    def create(self) -> None:
        """Request the machines."""
        ...

    def replace(self) -> list[str]:
        """Remove broken machines; return a line for each that remains."""
        ...

    def remove(self) -> list[str]:
        """Remove all machines; return a line for each that remains."""
        ...

    def start(self) -> str:
        """Start the run's supervisor on hosts without one; return a line about it."""
        ...

    def end(self) -> None:
        """Ask the run to save itself and exit; wait for that up to the grace period."""
        ...

    def outcome(self) -> Outcome | None:
        """Return the run's outcome so far; None: never started, or forgotten."""
        ...

    def forget(self, before: Outcome) -> None:
        """Return None from `outcome` until the run has another one than `before`."""
        ...

    def last_step(self) -> str:
        """Return when the run last wrote a step, ISO 8601; empty: never."""
        ...

    def logs(self, lines: int) -> str:
        """Return the last lines of every host, each with the host's name."""
        ...

    def fetch(self, target: str) -> None:
        """Copy the run's files here, except checkpoints."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patience:
    """Pauses in seconds and limits of attempts of `keep`."""

    poll_s: float = 30.0
    first_pause_s: float = 60.0  # after a refusal; doubles with each further one
    longest_pause_s: float = 900.0
    refusals: int = 60  # in a row, of machines, of the run's start or of answers
    losses: int = 20  # in a row, before the run started; the last one ends `keep`


class Refused(RuntimeError):
    """The place refuses a request that may succeed later."""


def keep(
    place: Place,
    *,
    patience: Patience,
    tell: Callable[[str], None],
    look: Callable[[Machines, Outcome | None], None] = lambda *_: None,
) -> Outcome:
    """Create machines, start the run, and replace lost machines until the run is over.

    Whatever the place refuses, an answer about its machines too, is asked again later.

    Args:
        tell: receives a line for each change, and for each refusal.
        look: called with machines and outcome in every iteration.

    Raises:
        RuntimeError: the place refuses too often, or for good.
    """
    pause_s, refusals, before = patience.first_pause_s, 0, ""
    losses = _Losses(patience.losses)
    while True:
        try:
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
            goes_on = _turn(place, machines, tell)
            if goes_on and outcome is not None and outcome.state == "running":
                losses.forget()
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
        if machines.state in ("up", "coming"):
            pause_s, refusals = patience.first_pause_s, 0
        if machines.state not in ("absent", "partial", "broken"):
            time.sleep(patience.poll_s)


class _Losses:
    """Counter of machines, in a row, that were lost before the run started on them."""

    def __init__(self, most: int) -> None:
        self._most, self._lost, self._attempts = most, 0, 0

    def forget(self) -> None:
        """Restart the count: the run goes on, on a head that was not lost."""
        self._lost = 0

    def count(self, outcome: Outcome | None) -> None:
        """Count a lost machine; restart the count if the run was started on it.

        Raises:
            RuntimeError: the limit is reached.
        """
        attempts = outcome.attempts if outcome else 0
        self._lost = self._lost + 1 if attempts == self._attempts else 0
        self._attempts = attempts
        if self._lost >= self._most:
            raise RuntimeError(
                f"{self._lost} machines in a row were lost before the run started on "
                f"them; `launch logs` shows the last lines of the last one"
            )


def _turn(place: Place, machines: Machines, tell: Callable[[str], None]) -> bool:
    """Do what the machines' state calls for; return True if a supervisor runs."""
    if machines.wrong:
        raise RuntimeError(machines.wrong)
    if machines.state == "unknown":
        raise RuntimeError(
            f"machines are in an unknown state: {machines.said}; look at them with "
            f"gcloud, and remove them with `launch stop`"
        )
    if machines.state in ("absent", "partial"):
        place.create()
        tell("machines are requested")
    elif machines.state == "broken":
        tell("lost machines are removed and created again")
        left = place.replace()
        if left:
            raise Refused(f"cannot be removed: {'; '.join(left)}")
    elif machines.state == "up":
        done = place.start()
        if "already" in done:
            return True
        tell(done)
    return False


def say(line: str) -> None:
    """Write a line with the time of day to stderr."""
    to_stderr(f"launch {time.strftime('%H:%M:%S')}: {line}\n")
    sys.stderr.flush()
